//! A main connection that is admitted at the moment at which its relay ends.

use super::*;
use crate::error::RelayError;
use crate::source::{Source, SourceConfig};
use crate::{Destination, Host, QemuAddress, Server, ServerConfig};
use codec::{Codec, Settings};
use session::{Grants, Hello};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;

const PAGE: u32 = 4096;
/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(300);

struct Quiet;

impl Host for Quiet {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &Destination) {
        let _ = destination.run(Vec::new);
    }

    fn notice(&self, _: &str) {}
}

fn receiver() -> ServerConfig {
    ServerConfig {
        targets: vec![(None, QemuAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 9))))],
        acceptor: None,
        decompress_threads: 1,
        qat: None,
        page_size: PAGE,
        grants: Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 },
        delta_cache: 0,
        seed: None,
        history: 0,
        resume: Duration::ZERO,
        silence: LIMIT,
    }
}

fn sender(peer: SocketAddr) -> SourceConfig {
    SourceConfig {
        peer: peer.to_string(),
        connector: None,
        settings: Settings::new(Codec::Lz4, None).unwrap(),
        auto: None,
        compress_threads: 1,
        compress_wait_thread: false,
        max_bandwidth: None,
        turns: None,
        links: 1,
        page_size: PAGE,
        name: None,
        setup: None,
        resume: Duration::ZERO,
        silence: LIMIT,
        connect_timeout: Duration::ZERO,
        answer_timeout: LIMIT,
        setup_timeout: LIMIT,
        delta_cache: 0,
        seed: 0,
        pages: None,
        history: 0,
        qpl: None,
    }
}

#[test]
fn a_return_path_that_begins_after_the_end_leaves_no_thread() {
    let server = Server::new(receiver(), Arc::new(Quiet)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let running = server.clone();
    let serving = std::thread::spawn(move || running.run(&listener, false).unwrap());
    let source = Source::connect_with(&sender(address), None, &mut |_| {}).unwrap();
    source.end(Err(RelayError::SourceEnded)).unwrap_err();
    let shared = source.handle().0;
    drop(source);
    // Its kind is of no interest here.
    let stream = shared.admit_disk(UnixStream::pair().unwrap().0.into());
    assert!(!open(&shared, &stream, Kind::Main), "the session has ended");
    assert!(stream.results.get().is_some(), "the return path has begun");
    let until = Instant::now() + LIMIT;
    while Arc::strong_count(&shared) > 1 {
        assert!(Instant::now() < until, "the writer of the return path does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.stop();
    server.stop();
    serving.join().unwrap();
}
