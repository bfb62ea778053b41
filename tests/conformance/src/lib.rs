//! Judges by Intel's own programs: the unmodified `libqatzip.so.3`, `qzip` and `qatzip-test` of
//! Debian trixie run on the simulated device.
//!
//! The binaries are those that `scripts/fetch-qat` unpacks under `target/qat/root`, or those under
//! the folder in `PLATEN_QAT_ROOT`. They are newer than most systems, so they run with their own
//! loader and C library. Without them a test prints why it skips; a test never downloads anything.
//!
//! Each run is a separate process, because QATzip and the device have state in their libraries.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A longer run is killed, so that a hang is a failure.
const LONGEST: Duration = Duration::from_secs(900);

/// Intel's programs and their environment.
#[derive(Debug)]
pub struct Intel {
    root: PathBuf,
    simulated: PathBuf,
}

/// The programs; `None`, after printing the reason, if there are none.
pub fn intel() -> Option<Intel> {
    let named = std::env::var_os("PLATEN_QAT_ROOT").map(PathBuf::from);
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/qat/root");
    let root = named.unwrap_or(fetched);
    let intel = Intel { root, simulated: PathBuf::new() };
    for file in [intel.loader(), intel.program("qzip"), intel.library("libqatzip.so.3")] {
        if !file.exists() {
            println!("skipped: no {}; `scripts/fetch-qat` fetches it", file.display());
            return None;
        }
    }
    Some(Intel { simulated: qat_sim::libraries(), ..intel })
}

/// The results of a process.
#[derive(Debug)]
pub struct Run {
    /// Its exit status, stdout and stderr.
    pub output: Output,
    /// The device's counters.
    pub report: serde_json::Value,
}

impl Run {
    /// A counter of the device.
    ///
    /// # Panics
    /// If the report has no counter of that name.
    pub fn count(&self, name: &str) -> u64 {
        self.report[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.report))
    }

    /// Both outputs, for an error message.
    pub fn text(&self) -> String {
        let Output { stdout, stderr, .. } = &self.output;
        format!("{}{}", String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr))
    }
}

impl Intel {
    /// One of the programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.root.join("usr/bin").join(name)
    }

    /// One of the libraries.
    pub fn library(&self, name: &str) -> PathBuf {
        self.root.join("usr/lib/x86_64-linux-gnu").join(name)
    }

    fn loader(&self) -> PathBuf {
        self.library("ld-linux-x86-64.so.2")
    }

    /// Runs a program on the simulated device.
    ///
    /// # Panics
    /// If it cannot be run, takes longer than three minutes, or leaves no report, which means that
    /// it crashed.
    pub fn run(&self, program: &Path, arguments: &[&str], folder: &Path, script: &str) -> Run {
        let report = tempfile::NamedTempFile::new().expect("a file for the report");
        let libraries = std::env::join_paths([self.simulated.clone(), self.library("")]);
        let mut command = Command::new(self.loader());
        command.arg("--library-path").arg(libraries.expect("no colon in the paths"));
        command.arg(program).args(arguments).current_dir(folder);
        command.env("PLATEN_QAT_SIM", script).env("PLATEN_QAT_SIM_REPORT", report.path());
        command.env_remove("QAT_SECTION_NAME").env_remove("LD_LIBRARY_PATH");
        let output = finish(command, &format!("{} {arguments:?}", program.display()));
        let text = std::fs::read_to_string(report.path()).expect("the report can be read");
        let report = serde_json::from_str(&text).unwrap_or_else(|error| {
            panic!("{} {arguments:?}: report: {error}: {output:?}", program.display())
        });
        Run { output, report }
    }

    /// The program of `client.c`, compiled against the real `qatzip.h` and `libqatzip.so.3`.
    ///
    /// # Panics
    /// If the C compiler fails.
    pub fn client(&self) -> PathBuf {
        static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
        let build = || {
            let folder = tempfile::tempdir().expect("a folder for the program");
            let binary = folder.path().join("client");
            let mut compiler = Command::new("cc");
            compiler.arg("-I").arg(self.root.join("usr/include"));
            compiler.arg("-I").arg(self.root.join("usr/include/qat"));
            compiler.args(["-O1", "-o"]).arg(&binary);
            compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("client.c"));
            compiler.arg(self.library("libqatzip.so.3")).args(["-ldl"]);
            // The libraries that libqatzip itself needs are found at run time.
            compiler.arg("-Wl,--allow-shlib-undefined");
            let output = compiler.output().expect("a C compiler runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            (folder, binary)
        };
        BUILT.get_or_init(build).1.clone()
    }
}

/// Waits for a process, with a limit.
fn finish(mut command: Command, name: &str) -> Output {
    // Files instead of pipes, which would have to be read while it runs.
    let capture = || tempfile::tempfile().expect("a file for the output");
    let (stdout, stderr) = (capture(), capture());
    let handle = |file: &std::fs::File| Stdio::from(file.try_clone().expect("a second handle"));
    command.stdin(Stdio::null()).stdout(handle(&stdout)).stderr(handle(&stderr));
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("our own child") {
            break status;
        }
        if start.elapsed() > LONGEST {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{name} took more than {LONGEST:?}: {}", read(stdout));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Output { status, stdout: read(stdout).into_bytes(), stderr: read(stderr).into_bytes() }
}

fn read(mut file: std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    file.rewind().expect("a regular file");
    file.read_to_end(&mut bytes).expect("a regular file");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// 30 MB of mixed compressibility: text-like, zero, repeated and random stretches.
pub fn sample() -> Vec<u8> {
    const LEN: usize = 30_000_000;
    let mut data = Vec::with_capacity(LEN + 65_536);
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    while data.len() < LEN {
        let length = usize::try_from(next() % 60_000).unwrap_or(0) + 1;
        match next() % 4 {
            0 => data.resize(data.len() + length, 0),
            1 => data.extend((0..length).map(|_| next().to_le_bytes()[3])),
            2 => {
                let words: [&[u8]; 8] =
                    [b"page ", b"of ", b"memory ", b"the ", b"is ", b"clean ", b"dirty ", b"\n"];
                for _ in 0..length / 4 {
                    data.extend_from_slice(words[usize::try_from(next() % 8).unwrap_or(0)]);
                }
            }
            _ => {
                let pattern = next().to_le_bytes();
                data.extend((0..length).map(|at| pattern[at % 8] ^ u8::from(at % 511 == 0)));
            }
        }
    }
    data.truncate(LEN);
    data
}
