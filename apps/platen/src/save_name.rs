//! The moment at which an image gets its name.

use crate::save::ASK;
use anyhow::{bail, Context};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time after which a disk that has not answered is reported.
const SLOW: Duration = Duration::from_secs(5);

/// Gives `image` its name by `link`, on a thread of its own: the disk may hang. An interrupt does
/// not end the wait. From now on the image may have its name at any moment, and only the answer
/// shows whether the VM may go on. `say` gets what is waited for.
///
/// # Errors
/// The thread has ended without a result.
pub(crate) fn named<T: Send + 'static>(
    link: impl FnOnce() -> T + Send + 'static,
    interrupted: &AtomicBool,
    image: &dyn Display,
    say: &mut dyn FnMut(&str),
) -> anyhow::Result<T> {
    let (done, over) = channel();
    let link = Arc::new(Mutex::new(Some(link)));
    let theirs = Arc::clone(&link);
    let body = move || {
        let link = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = link.map(|link| done.send(link()));
    };
    if thread::Builder::new().name("name".into()).spawn(body).is_err() {
        // The image is complete, and may be all that is left of the VM.
        let link = link.lock().unwrap_or_else(PoisonError::into_inner).take();
        return link.map(|link| link()).context("the image has no name");
    }
    let begin = Instant::now();
    let (mut is_slow, mut is_heard) = (false, false);
    loop {
        match over.recv_timeout(ASK) {
            Ok(linked) => return Ok(linked),
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that names {image} has ended"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if interrupted.load(Ordering::Acquire) && !is_heard {
            (is_heard, is_slow) = (true, true);
            say(&format!(
                "interrupted as {image} gets its name: it may have the name already, so this waits \
                 for its disk. SIGKILL ends this process without an answer, unless the kernel itself \
                 waits for the disk: then another monitor of QEMU can let the VM go on (`cont`), \
                 and the image must never be restored"
            ));
        } else if begin.elapsed() >= SLOW && !is_slow {
            is_slow = true;
            say(&format!("waiting for the disk of {image}, which gets its name"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_is_heard_while_the_disk_hangs_and_the_answer_is_waited_for() {
        let interrupted = AtomicBool::new(true);
        let (release, hangs) = channel::<()>();
        let mut release = Some(release);
        let mut said = Vec::new();
        let mut say = |text: &str| {
            said.push(text.to_owned());
            // The disk answers once the interrupt is heard.
            release = None;
        };
        let linked = named(move || hangs.recv().is_err(), &interrupted, &"g1.image", &mut say);
        assert!(linked.unwrap());
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("interrupted as g1.image gets its name"), "{said:?}");
        assert!(said[0].contains("unless the kernel itself waits for the disk"), "{said:?}");
    }

    #[test]
    fn a_disk_that_does_not_answer_for_a_while_is_named() {
        let interrupted = AtomicBool::new(false);
        let (release, hangs) = channel::<()>();
        let mut release = Some(release);
        let mut said = Vec::new();
        let mut say = |text: &str| {
            said.push(text.to_owned());
            release = None;
        };
        named(move || hangs.recv().is_err(), &interrupted, &"g1.image", &mut say).unwrap();
        assert_eq!(said, ["waiting for the disk of g1.image, which gets its name"]);
    }
}
