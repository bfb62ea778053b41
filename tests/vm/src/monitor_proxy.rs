//! A monitor between platen and QEMU that changes what platen hears.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

/// Passes on the lines of QEMU's monitor, with `hidden` replaced by a name that means nothing. The
/// first client hears nothing more from the first line on that contains `silent_from`.
#[derive(Debug)]
pub struct MonitorProxy {
    path: PathBuf,
    fell_silent: Arc<AtomicBool>,
}

impl MonitorProxy {
    /// Listens at `path` for clients of the monitor at `qemu`.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn start(
        path: &Path,
        qemu: &Path,
        hidden: &'static str,
        silent_from: &'static str,
    ) -> Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        let fell_silent = Arc::new(AtomicBool::new(false));
        let (silent, qemu) = (fell_silent.clone(), qemu.to_path_buf());
        // Both threads of a client end with its connection; this one with the test.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(monitor) = UnixStream::connect(&qemu) else { continue };
                let _ = pass_on(client, monitor, (hidden, silent_from), &silent);
            }
        });
        Ok(Self { path: path.to_path_buf(), fell_silent })
    }

    /// The socket for platen.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the first client hears nothing any more.
    pub fn fell_silent(&self) -> bool {
        self.fell_silent.load(Ordering::Acquire)
    }
}

fn pass_on(
    client: UnixStream,
    monitor: UnixStream,
    (hidden, silent_from): (&'static str, &'static str),
    silent: &Arc<AtomicBool>,
) -> std::io::Result<()> {
    let (mut asks, mut hears) = (client.try_clone()?, monitor.try_clone()?);
    let gone = Arc::new(AtomicBool::new(false));
    let (left, silent) = (gone.clone(), silent.clone());
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(got @ 1..) = asks.read(&mut bytes) {
            if hears.write_all(&bytes[..got]).is_err() {
                break;
            }
        }
        left.store(true, Ordering::Release);
        let _ = hears.shutdown(Shutdown::Both);
    });
    std::thread::spawn(move || {
        let mut client = client;
        for line in BufReader::new(monitor).lines() {
            let Ok(line) = line else { break };
            if line.contains(silent_from) && !silent.swap(true, Ordering::AcqRel) {
                while !gone.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let line = line.replace(hidden, "hidden");
            if client.write_all(format!("{line}\r\n").as_bytes()).is_err() {
                break;
            }
        }
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}
