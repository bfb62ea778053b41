//! The end of a destination whose links, seed or host still do something.

use super::*;
use crate::destination::decode::DecodeContext;
use crate::unix::UnixAddress;
use pipeline::PoolConfig;
use session::{FrameType, Header, Incoming};

const PAGE: usize = 4096;
/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// A destination without links, whose QEMU does not listen.
fn destination(listen: Listen, seed: Option<Offered>) -> Arc<Destination> {
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
    let pool = PoolConfig { threads: 1, name: "decompress", ..PoolConfig::default() };
    let pool = Pool::new(pool, |_| DecodeContext::new(None)).unwrap();
    let target = UnixAddress::from(std::path::PathBuf::from("/nonexistent/qemu"));
    let destination = Destination::new(
        "the source".into(),
        (grants, (1, Duration::ZERO)),
        (PAGE, 0, None),
        (target.into(), listen, Box::new(|_| Ok(()))),
        pool,
        Box::new(|_| {}),
        (false, seed),
    );
    Arc::new(destination.unwrap())
}

fn cancel(destination: &Destination) {
    destination.session().fail(SessionError::Local { reason: "cancelled".into() });
}

/// Waits until no thread of the session is left.
fn until_alone(shared: &Arc<Shared>) {
    let until = Instant::now() + LIMIT;
    while Arc::strong_count(shared) > 1 {
        assert!(Instant::now() < until, "a thread of the session does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Another link may bring frames of new streams after the end.
#[test]
fn a_stream_that_begins_after_the_end_leaves_no_thread() {
    let destination = destination(Box::new(|| Ok(())), None);
    cancel(&destination);
    destination.run(Vec::new).unwrap_err();
    // Its writer would wait for the frame before it.
    let header = Header { stream: 5, seq: 1, ..Header::free(FrameType::StillOpen, 0) };
    destination.sink.frame(Incoming { header, unit: None }).unwrap();
    assert!(destination.shared.streams[5].get().is_some(), "the stream has begun");
    until_alone(&destination.shared);
}
