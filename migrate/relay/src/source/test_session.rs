//! A source relay with an open session, for the tests of this folder. Its receiver has no QEMU.

use super::{Source, SourceConfig};
use crate::{Destination, Host, QemuAddress, Server, ServerConfig};
use codec::{Codec, Settings};
use session::{Grants, Hello};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

pub(super) const PAGE: u32 = 4096;
/// Nothing in these tests takes this long unless it hangs.
pub(super) const LIMIT: Duration = Duration::from_secs(300);

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

pub(super) fn receiver() -> ServerConfig {
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

/// Runs `test` with a source relay whose session, with this receiver, is open. `adapt` changes the
/// configuration of the source.
pub(super) fn with_session(
    receiver: ServerConfig,
    adapt: impl FnOnce(&mut SourceConfig),
    test: impl FnOnce(Source),
) {
    let server = Server::new(receiver, Arc::new(Quiet)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = sender(listener.local_addr().unwrap());
    adapt(&mut config);
    let running = server.clone();
    let serving = std::thread::spawn(move || running.run(&listener, false).unwrap());
    test(Source::connect_with(&config, None, &mut |_| {}).unwrap());
    server.stop();
    server.stop();
    serving.join().unwrap();
}
