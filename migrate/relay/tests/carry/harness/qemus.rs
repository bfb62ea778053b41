//! Synthetic QEMUs: a source that writes, and a destination that reads.

use super::*;

/// Counters that threads can wait for.
pub(crate) struct Gate(Mutex<Vec<u64>>, Condvar);

impl Gate {
    pub(crate) fn new(counts: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![0; counts]), Condvar::new()))
    }

    pub(crate) fn reach(&self, which: usize, value: u64) {
        self.0.lock().unwrap()[which] = value;
        self.1.notify_all();
    }

    /// Waits until the counters `which` are all at least `value`.
    pub(crate) fn wait(&self, which: impl Iterator<Item = usize> + Clone, value: u64) {
        let until = Instant::now() + WATCHDOG;
        let mut counts = self.0.lock().unwrap();
        while which.clone().any(|which| counts[which] < value) {
            assert!(Instant::now() < until, "nobody gets to {value}");
            counts = self.1.wait_timeout(counts, Duration::from_secs(1)).unwrap().0;
        }
    }
}

/// Writes in pieces of odd sizes.
fn write_pieces(mut socket: &UnixStream, mut bytes: &[u8], piece: usize, noise: &mut Noise) {
    while !bytes.is_empty() {
        let size = match piece {
            0 => bytes.len(),
            piece => 1 + usize::try_from(noise.next()).unwrap() % piece,
        };
        let (now, rest) = bytes.split_at(size.min(bytes.len()));
        socket.write_all(now).expect("the relay takes it");
        bytes = rest;
    }
}

/// One migration's bytes, as the source QEMU writes them: main, then the channels.
#[derive(Clone)]
pub(crate) struct Streams {
    pub(crate) main: Vec<u8>,
    pub(crate) channels: Vec<Vec<u8>>,
}

/// A source QEMU: writes everything with QEMU's order between channels (a marker on main only after
/// all SYNCs before it), then waits for SHUT. Returns the bytes of the return path.
pub(crate) fn source_qemu(path: PathBuf, streams: Streams, piece: usize) -> JoinHandle<Vec<u8>> {
    source_that_tells(path, streams, piece, || ())
}

/// The same; calls `written` once everything is written.
pub(crate) fn source_that_tells(
    path: PathBuf,
    streams: Streams,
    piece: usize,
    written: impl FnOnce() + Send + 'static,
) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let Streams { main, channels } = streams;
        let socket = UnixStream::connect(&path).unwrap();
        let gate = Gate::new(channels.len());
        let count = channels.len();
        let writers: Vec<_> = channels
            .into_iter()
            .enumerate()
            .map(|(id, bytes)| {
                let (socket, gate) = (UnixStream::connect(&path).unwrap(), gate.clone());
                std::thread::spawn(move || {
                    let mut noise = Noise(77 + id as u64);
                    let mut done = 0;
                    for (end, sync) in sync_ends(&bytes).into_iter().zip(1..) {
                        write_pieces(&socket, &bytes[done..end], piece, &mut noise);
                        done = end;
                        gate.reach(id, sync);
                    }
                    write_pieces(&socket, &bytes[done..], piece, &mut noise);
                    socket
                })
            })
            .collect();
        let mut noise = Noise(99);
        let mut done = 0;
        for (start, marker) in marker_starts(&main).into_iter().zip(1..) {
            write_pieces(&socket, &main[done..start], piece, &mut noise);
            done = start;
            gate.wait(0..count, marker);
        }
        write_pieces(&socket, &main[done..], piece, &mut noise);
        let channels: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        written();
        let mut back = Vec::new();
        let mut byte = [0; 1];
        while !back.ends_with(&SHUT_OK) && (&socket).read(&mut byte).is_ok_and(|n| n == 1) {
            back.push(byte[0]);
        }
        drop(channels);
        back
    })
}

/// The order in which a destination QEMU reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// As fast as possible.
    Prompt,
    /// This channel does not read its first packet until all others have reached their second SYNC.
    LazyChannel(usize),
    /// Main does not read on behind its header until all channels have reached their second SYNC.
    LazyMain,
}

/// A destination QEMU that expects `streams`. As in QEMU, each channel stops after each SYNC until
/// main has reached the barrier, and main waits there for the SYNC of every channel. Sends PONG
/// first and SHUT(0) last. Returns the bytes read.
pub(crate) fn destination_qemu(
    listener: UnixListener,
    expected: &Streams,
    reader: Reader,
) -> JoinHandle<Streams> {
    let starts = marker_starts(&expected.main);
    let len = expected.main.len();
    let ends: Vec<_> =
        expected.channels.iter().map(|channel| (sync_ends(channel), channel.len())).collect();
    std::thread::spawn(move || {
        let count = ends.len();
        let (main, _) = listener.accept().unwrap();
        // Counters 0..count are the channels' SYNCs, the last one is the barriers that main has
        // passed.
        let gate = Gate::new(count + 1);
        let mut received = Streams { main: Vec::new(), channels: vec![Vec::new(); count] };
        let readers: Vec<_> = (0..count)
            .map(|_| {
                let (socket, _) = listener.accept().unwrap();
                let init = read_exactly(&socket, 64);
                let id = usize::from(init[24]);
                let ((ends, len), gate) = (ends[id].clone(), gate.clone());
                std::thread::spawn(move || {
                    let mut got = init;
                    for (end, sync) in ends.into_iter().zip(1..) {
                        if reader == Reader::LazyChannel(id) && sync == 2 {
                            gate.wait((0..count).filter(|other| *other != id), 2);
                        }
                        got.extend(read_exactly(&socket, end - got.len()));
                        gate.reach(id, sync);
                        gate.wait(count..=count, sync);
                    }
                    got.extend(read_exactly(&socket, len - got.len()));
                    (id, got, socket)
                })
            })
            .collect();
        let mut got = Vec::new();
        for (start, marker) in starts.into_iter().zip(1..) {
            if count == 0 {
                break;
            }
            if reader == Reader::LazyMain && marker == 2 {
                gate.wait(0..count, 2);
            }
            got.extend(read_exactly(&main, start + 8 - got.len()));
            gate.wait(0..count, marker);
            gate.reach(count, marker);
        }
        (&main).write_all(&[0, 2, 0, 4, 0, 0, 0, 1]).unwrap();
        got.extend(read_exactly(&main, len - got.len()));
        received.main = got;
        let mut sockets = Vec::new();
        for reader in readers {
            let (id, got, socket) = reader.join().unwrap();
            received.channels[id] = got;
            sockets.push(socket);
        }
        // QEMU closes its channels before it reports the result.
        drop(sockets);
        (&main).write_all(&SHUT_OK).unwrap();
        received
    })
}
