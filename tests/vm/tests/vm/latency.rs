//! A path whose latency changes in mid-course: the relays with a source that always has bytes,
//! and no QEMU. `session/pacing/simulated` shows the same in virtual time.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::table::to_f64;
use vm_tests::{LongPath, Side};

use crate::stage::Stage;
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::measurement(
            "a_path_whose_latency_changes_both_ways_is_filled_again_in_5_s",
            |stage| {
                let [to_long, back] = [path(LONG), path(Duration::ZERO)];
                follows(stage, &[path(Duration::ZERO), to_long, back])
            },
        ),
        Scenario::measurement("a_session_beside_a_bulk_flow_has_its_share_in_5_s", |stage| {
            let beside = |round_trip| Path { bulk: true, ..path(round_trip) };
            let course = [path(Duration::ZERO), beside(Duration::ZERO), beside(LONG), path(LONG)];
            follows(stage, &course)
        }),
        Scenario::measurement("a_session_resumed_over_another_path_fills_it_in_5_s", |stage| {
            let resumed = |round_trip| Path { resumed: true, ..path(round_trip) };
            follows(stage, &[path(Duration::ZERO), resumed(LONG), resumed(Duration::ZERO)])
        }),
    ]
}

/// The path from a moment on.
#[derive(Debug, Clone, Copy)]
struct Path {
    round_trip: Duration,
    /// Another flow fills the bottleneck.
    bulk: bool,
    /// All links are lost at the change.
    resumed: bool,
}

fn path(round_trip: Duration) -> Path {
    Path { round_trip, bulk: false, resumed: false }
}

/// Bytes per second of the bottleneck. With the least window (1 MiB) a session gets half of it at
/// [`LONG`], and both relays together a fraction of this machine's CPU.
const RATE: f64 = 20e6;
const LONG: Duration = Duration::from_millis(100);
/// After a change a session has this long to settle, and is then measured.
const SETTLES: Duration = Duration::from_secs(5);
const MEASURED: Duration = Duration::from_secs(3);
/// The least share of a fresh session's throughput.
const SHARE: f64 = 0.9;
/// Another process that takes the CPU during a measurement makes it worthless. A window that does
/// not follow the latency fails each time.
const TRIES: usize = 3;

/// One session over all of `course`; on each path but the first a fresh session is compared.
fn follows(stage: &mut Stage, course: &[Path]) -> Result<()> {
    let mut worst = 0.0;
    for _ in 0..TRIES {
        worst = f64::INFINITY;
        let rates = rates(stage, course)?;
        for (now, rate) in course.iter().zip(rates).skip(1) {
            let [fresh] = self::rates(stage, &[*now])?[..] else { anyhow::bail!("one rate") };
            println!("  {now:?}: {:.1} MB/s, fresh {:.1}", rate / 1e6, fresh / 1e6);
            worst = worst.min(rate / fresh);
            // A fresh session that does not fill the path would make this easy.
            let least = if now.bulk { 0.2 } else { 0.8 };
            ensure!(fresh > least * RATE, "a fresh session gets {fresh:.0} of {RATE:.0}");
        }
        if worst >= SHARE {
            return Ok(());
        }
    }
    anyhow::bail!("5 s after a change of the path it has {:.0} % of a fresh session", worst * 1e2)
}

/// The throughput of one session on each of these paths in turn.
fn rates(stage: &mut Stage, course: &[Path]) -> Result<Vec<f64>> {
    let session = Session::start(stage, course[0].round_trip)?;
    let mut rates = Vec::new();
    for now in course {
        let _bulk = now.bulk.then(|| session.path.compete());
        session.path.set_round_trip(now.round_trip);
        if now.resumed && !rates.is_empty() {
            session.path.cut();
        }
        std::thread::sleep(SETTLES);
        let (begin, before) = (Instant::now(), session.arrived.load(Ordering::Relaxed));
        std::thread::sleep(MEASURED);
        let bytes = session.arrived.load(Ordering::Relaxed) - before;
        rates.push(to_f64(bytes) / begin.elapsed().as_secs_f64());
        ensure!(bytes > 0, "nothing arrives: {}", session.relay.process.tail());
    }
    Ok(rates)
}

/// Both relays, a path between them, and bytes without end.
struct Session {
    source: UnixStream,
    relay: Platen,
    _receive: Receive,
    path: LongPath,
    /// Bytes that the destination has read.
    arrived: Arc<AtomicU64>,
}

impl Session {
    fn start(stage: &Stage, round_trip: Duration) -> Result<Self> {
        let lab = &stage.lab;
        let (source, deliver) = (lab.scratch("source"), lab.scratch("deliver"));
        let listener = UnixListener::bind(&deliver)?;
        let arrived = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&arrived);
        std::thread::spawn(move || read_all(&listener, &counted));
        let deliver = format!("unix:{}", deliver.display());
        let flags = ["--insecure", "--deliver", &deliver];
        let receive = platen::receive_with(lab, Side::Destination, &flags)?;
        let path = LongPath::start(&lab.net, Side::Source, receive.peer, RATE)?;
        path.set_round_trip(round_trip);
        let flags = ["--insecure", "--codec", "none"];
        let relay = platen::relay(lab, Side::Source, &source, path.address, &flags)?;
        let source = UnixStream::connect(&source)?;
        let writing = source.try_clone()?;
        std::thread::spawn(move || write_all(writing));
        Ok(Self { source, relay, _receive: receive, path, arrived })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Otherwise the keeper would hold the socket of a source that is in doubt.
        let _ = self.source.shutdown(Shutdown::Both);
    }
}

/// A file header, then bytes without structure, until the relay ends.
fn write_all(mut socket: UnixStream) -> std::io::Result<()> {
    socket.write_all(b"QEVM\0\0\0\x03")?;
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = vec![0xee; 64 << 10];
    loop {
        for word in bytes.chunks_exact_mut(8) {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            word.copy_from_slice(&(noise | 0xee).to_le_bytes());
        }
        socket.write_all(&bytes)?;
    }
}

fn read_all(listener: &UnixListener, arrived: &AtomicU64) -> std::io::Result<()> {
    let (mut socket, _) = listener.accept()?;
    let mut bytes = vec![0; 256 << 10];
    loop {
        match socket.read(&mut bytes)? {
            0 => return Ok(()),
            len => arrived.fetch_add(len as u64, Ordering::Relaxed),
        };
    }
}
