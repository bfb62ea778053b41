//! The exchange with a QEMU whose restore is continued: the pages that it has, and RESUME.

use std::sync::Arc;

use super::{Event, Playing};
use crate::back::Message;
use crate::socket::{Wait, MOST};
use crate::{wire, PlayError};

impl Playing {
    /// Asks QEMU for the received bitmap of each block.
    pub(super) fn ask_received(&mut self) -> Result<(), PlayError> {
        let wait = Wait::begin("the bitmap of the pages that it has");
        let mut out = Vec::new();
        let image = Arc::clone(&self.player.image);
        for (number, block) in image.index().blocks.iter().enumerate() {
            self.socket.back.expect_bitmap(block.pages);
            out.clear();
            wire::ask_received(&mut out, &block.name);
            self.socket.send(&out)?;
            let bits = loop {
                match self.socket.next(&wait)? {
                    Message::Received { block: of, bits } if of == block.name => break bits,
                    Message::Received { block: of, .. } => {
                        let (of, name) = (of.escape_default(), block.name.escape_default());
                        let text = format!("bitmap of '{of}', asked for '{name}'");
                        return Err(PlayError::Back(text));
                    }
                    // QEMU requests its missing pages again after RESUME.
                    _ => {}
                }
            };
            self.player.server.pending.take_all(number, &bits);
        }
        Ok(())
    }

    /// Makes QEMU continue; returns its requests up to its answer.
    pub(super) fn ask_resume(
        &mut self,
        on: &mut dyn FnMut(Event),
    ) -> Result<Vec<Message>, PlayError> {
        let wait = Wait::begin("its answer to RESUME");
        let mut out = Vec::new();
        wire::command(&mut out, wire::RESUME, &[]);
        self.socket.send(&out)?;
        on(Event::Resuming);
        let mut early = Vec::new();
        loop {
            match self.socket.next(&wait)? {
                Message::Resumed(1) => return Ok(early),
                Message::Resumed(value) => {
                    let text = format!("it does not continue (RESUME_ACK {value})");
                    return Err(PlayError::Back(text));
                }
                request @ Message::Pages { .. } if early.len() < MOST => early.push(request),
                Message::Pages { .. } => {
                    let text = format!("more than {MOST} requests before it continues");
                    return Err(PlayError::Back(text));
                }
                _ => {}
            }
        }
    }
}
