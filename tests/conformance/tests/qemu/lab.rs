//! Finds a device and QATzip for the tests, and runs each test in a process of its own: QATzip's
//! state is global to the process, and its first error disables it there.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Paths of the libraries.
pub(crate) struct Paths {
    /// Folder of the simulated device's libraries.
    pub(crate) drivers: PathBuf,
    /// QATzip's library.
    pub(crate) qatzip: PathBuf,
}

/// Finds the libraries; prints what is missing and returns `None` otherwise.
pub(crate) fn paths() -> Option<Paths> {
    let fetched = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/qat/root/usr/lib");
    let named = std::env::var_os("PLATEN_QATZIP").map(PathBuf::from);
    let folders = [fetched, "/usr/lib", "/usr/lib64"].into_iter().flat_map(|folder| {
        let below = std::fs::read_dir(folder).into_iter().flatten().flatten();
        below.map(|entry| entry.path()).chain([PathBuf::from(folder)]).collect::<Vec<_>>()
    });
    let files = folders.map(|folder| folder.join("libqatzip.so.3"));
    let Some(file) = named.into_iter().chain(files).find(|file| file.is_file()) else {
        println!("skipped: no libqatzip.so.3 on this machine (`make setup`, or PLATEN_QATZIP)");
        return None;
    };
    Some(Paths { drivers: drivers().to_owned(), qatzip: file })
}

/// Folder of the simulated device's libraries, built if necessary.
pub(crate) fn drivers() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    // The first process has built them.
    let built = || std::env::var_os("QATZIP_TEST_DRIVERS").map(PathBuf::from);
    FOLDER.get_or_init(|| built().unwrap_or_else(qat_sim::libraries))
}

/// Runs `body` in a process of its own whose simulated device follows `script`. `test` is the name
/// of the test function that calls this, which the new process runs again.
#[track_caller]
pub(crate) fn alone(test: &str, script: &str, body: impl FnOnce(Paths)) {
    let Some(paths) = paths() else { return };
    let case = format!("{test} {script}");
    if let Ok(running) = std::env::var("QATZIP_TEST_CASE") {
        if running == case {
            body(paths);
        }
        return;
    }
    let folder = tempfile::tempdir().expect("a folder for the report");
    let report = folder.path().join("report.json");
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("QATZIP_TEST_CASE", &case)
        .env("QATZIP_TEST_DRIVERS", drivers())
        .env("PLATEN_QAT_SIM", script)
        .env("PLATEN_QAT_SIM_REPORT", &report)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this test starts again");
    // Read while the process runs: a full pipe would block it.
    let mut pipes: Vec<Box<dyn Read + Send>> = Vec::new();
    pipes.extend(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    pipes.extend(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let readers: Vec<_> = pipes
        .into_iter()
        .map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        })
        .collect();
    // Only a hang exceeds this limit; it includes QATzip's exit handlers.
    let end = Instant::now() + Duration::from_secs(600);
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            break Some(status);
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text: String = readers.into_iter().filter_map(|reader| reader.join().ok()).collect();
    match status {
        Some(status) if status.success() => {}
        Some(status) => panic!("{case}: {status}\n{text}"),
        None => panic!("{case}: did not end within ten minutes\n{text}"),
    }
    assert!(text.contains("1 passed"), "{case}: the new process ran no test\n{text}");
    // Errors that a real device would punish: accesses outside pinned memory, invalid frees.
    if let Ok(report) = std::fs::read_to_string(&report) {
        let sound = report.replace(' ', "").contains("\"violations\":0,");
        assert!(sound, "{case}: the device has complaints\n{report}");
    }
}

/// Pseudo-random bytes that compress about as well as guest memory.
pub(crate) fn pages(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = seed;
    let mut bytes = Vec::with_capacity(len + 16);
    while bytes.len() < len {
        let number = next(&mut rng);
        let word = match number % 5 {
            0 => 0x7f12_0000_0000 | (number >> 40),
            1 => number >> 56,
            2 => number,
            _ => 0,
        };
        bytes.extend(word.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// splitmix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
