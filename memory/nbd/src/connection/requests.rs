//! One request from the input: done, refused, or begun in slices.

use super::*;

impl<Q: Queue> Connection<'_, Q> {
    pub(super) fn request(&mut self) -> Result<Option<Need>, ConnectionError> {
        let Some(bytes) = self.input.front().first_chunk::<REQUEST>() else {
            return Ok(Some(Need::Input));
        };
        // There must be room for the reply to a small request.
        if self.output.room() < RESERVE + DATA_CHUNK + SMALL {
            return Ok(Some(Need::Room));
        }
        let request = match self.session.parse(bytes) {
            Parsed::Do(request) => request,
            Parsed::Refuse { cookie, error, skip, structured } => {
                self.input.take(REQUEST);
                self.fail(cookie, error, structured);
                self.current = Some(Current::Skip { left: skip as usize });
                return Ok(None);
            }
            Parsed::Disconnect => return Ok(Some(Need::End)),
            Parsed::Broken(why) => return Err(why.into()),
        };
        let Request { command, cookie, offset, length } = request;
        if self.deserted && matches!(command, Command::Write | Command::Trim | Command::Zero { .. })
        {
            return Err(ConnectionError::Cut);
        }
        let len = length as usize;
        let write = command == Command::Write;
        if matches!(command, Command::Read { .. }) {
            if self.waiting.len() == WAITING {
                return Ok(Some(Need::Room));
            }
            self.input.take(REQUEST);
            // A slice ends at a page boundary.
            let one = split(offset).1 + len <= self.slice;
            if command == (Command::Read { whole: true }) && !one {
                self.fail(cookie, Error::Overflow, true);
            } else if len > SMALL || !self.read_small(cookie, offset, len) {
                self.waiting.push_back(Waiting { cookie, offset, left: len, large: None });
                self.give_out();
            }
            return Ok(None);
        }
        // If the thread waited here, this write and each after it would take the device's full
        // latency.
        if write && (len > SMALL || len > 0 && self.queue.defers_writes()) {
            let large = self.enter(cookie, true);
            self.input.take(REQUEST);
            self.current = Some(Current::Write { large, offset, left: len, slice: None });
            return Ok(None);
        }
        if write && self.input.len() < REQUEST + len {
            return Ok(Some(Need::Input));
        }
        self.input.take(REQUEST);
        let done = match command {
            Command::Read { .. } => unreachable!("it was done above"),
            Command::Status { one } => {
                self.status(cookie, offset, u64::from(length), one);
                return Ok(None);
            }
            Command::Flush => Ok(()),
            Command::Write => {
                let done = self.write_small(offset, len);
                self.input.take(len);
                done
            }
            Command::Trim => self.trim(offset, u64::from(length)),
            Command::Zero { keep } => self.zero(offset, u64::from(length), keep),
        };
        self.output.put(&simple_reply(cookie, done.err().map(Error::from)));
        Ok(None)
    }

    pub(super) fn fail(&mut self, cookie: u64, error: Error, structured: bool) {
        if structured && self.session.structured {
            self.output.put(&error_chunk(cookie, error));
        } else {
            self.output.put(&simple_reply(cookie, Some(error)));
        }
    }
}
