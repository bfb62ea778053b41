//! A restore that loads everything before the VM runs.

use crate::restore_fit::{was_paused, why_paused};
use crate::restore_interrupt;
use crate::restore_player::connect;
use crate::restore_source::Source;
use crate::restore_vm::Vm;
use crate::saved_vm::{listen, wait_started};
use anyhow::{bail, Context};
use player::{plain, Message, PlainOptions, PlayError, ReturnPath};
use qmp::Qmp;
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};
use serde_json::{json, Value};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit for a QEMU that reads nothing of the stream, or does not confirm its end.
const SILENCE: Duration = Duration::from_secs(600);

/// Send buffer of the socket, bytes. Without CAP_NET_ADMIN net.core.wmem_max limits it.
const SEND_BUFFER: usize = 1 << 20;

/// Sends the whole VM, and waits until QEMU has loaded it. `fallback` is the reason why the VM does
/// not run at once, for the report.
pub(crate) fn load(
    vm: &Vm,
    source: &Source<'_>,
    qmp: &mut Qmp,
    dir: &tempfile::TempDir,
    how: PlainOptions,
    fallback: Option<&str>,
) -> anyhow::Result<Value> {
    let path = dir.path().join("load.sock");
    listen(qmp, &format!("unix:{}", path.display()))?;
    let begin = Instant::now();
    let bytes = send_whole(source, &path, how)?;
    let loaded = begin.elapsed();
    let state = wait_started(qmp)?;
    vm.say(&format!("loaded in {:.2} s: the VM is '{state}'", loaded.as_secs_f64()));
    if state == "paused" && was_paused(&source.image) {
        vm.say("the VM is paused, as it was saved: cont resumes it");
    }
    if let Some(why) = why_paused(&state, &source.image) {
        vm.say(why);
    }
    Ok(json!({
        "status": "completed", "mode": "load", "fallback": fallback, "vm": state,
        "loaded-ms": loaded.as_secs_f64() * 1e3, "bytes": bytes,
        "cpu-s": crate::report::process_cpu(),
    }))
}

/// Sends the whole VM to the QEMU that listens at `path` or is about to, and waits until QEMU has
/// loaded it. Returns the number of bytes.
pub(crate) fn send_whole(
    source: &Source<'_>,
    path: &Path,
    how: PlainOptions,
) -> anyhow::Result<u64> {
    restore_interrupt::loads();
    let mut stream = connect(path)?;
    stream.set_write_timeout(Some(SILENCE)).context("QEMU's socket")?;
    // QEMU reads in pieces of 32 KiB: with room for many of them the two processes switch less.
    set_socket_send_buffer_size_force(&stream, SEND_BUFFER)
        .or_else(|_| set_socket_send_buffer_size(&stream, SEND_BUFFER))
        .context("QEMU's socket")?;
    let bytes = match plain(&source.image, &mut stream, how) {
        Ok(bytes) => bytes,
        Err(PlayError::Closed) => bail!("{}; its log has the reason", PlayError::Closed),
        Err(PlayError::Io { source, .. }) if source.kind() == ErrorKind::WouldBlock => {
            bail!("QEMU has read nothing for {} s: see its log and its monitor", SILENCE.as_secs());
        }
        Err(error @ PlayError::Image(_)) => {
            let named =
                anyhow::Error::from(error).context(format!("image {}", source.path.display()));
            return Err(named.context("nothing runs: QEMU was not given the whole VM"));
        }
        Err(error) => return Err(error).context("nothing runs: QEMU was not given the whole VM"),
    };
    wait_for_shut(&mut stream, SILENCE)?;
    Ok(bytes)
}

/// Reads the return path up to SHUT, for which QEMU has `limit`, whatever else it sends.
fn wait_for_shut(stream: &mut UnixStream, limit: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + limit;
    let late = || PlayError::Silent { what: "its SHUT at the end", seconds: limit.as_secs() };
    let mut back = ReturnPath::default();
    let mut chunk = [0; 4096];
    loop {
        while let Some(message) = back.message()? {
            match message {
                Message::Shut(0) => return Ok(()),
                Message::Shut(value) => return Err(PlayError::Refused(value).into()),
                _ => {}
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late().into());
        }
        stream.set_read_timeout(Some(left)).context("QEMU's socket")?;
        match stream.read(&mut chunk) {
            Ok(0) => bail!("{}; its log has the reason", PlayError::Closed),
            // QEMU has closed its socket before it had read everything.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                bail!("{}; its log has the reason", PlayError::Closed);
            }
            Ok(len) => back.push(&chunk[..len]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(late().into());
            }
            Err(error) => return Err(error).context("cannot read QEMU's return path"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// Regression: the limit began again at each message.
    #[test]
    fn messages_do_not_prolong_the_wait_for_the_end() {
        const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 0];
        let (mut ours, mut qemu) = UnixStream::pair().unwrap();
        let is_over = AtomicBool::new(false);
        let waited = thread::scope(|scope| {
            scope.spawn(|| {
                // Long after the limit it ends the wait itself.
                let until = Instant::now() + Duration::from_secs(60);
                while !is_over.load(Ordering::Acquire) && Instant::now() < until {
                    qemu.write_all(&PONG).unwrap();
                    thread::sleep(Duration::from_millis(1));
                }
                qemu.shutdown(std::net::Shutdown::Both).unwrap();
            });
            // Longer than a busy machine holds a message up: a limit for each message would not end
            // the wait.
            let waited = wait_for_shut(&mut ours, Duration::from_secs(3));
            is_over.store(true, Ordering::Release);
            waited
        });
        let error = waited.unwrap_err().to_string();
        assert!(error.contains("has not sent its SHUT at the end"), "{error}");
    }
}
