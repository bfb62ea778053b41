//! The events that a connection's thread waits for: on its socket, and on its queue.

use super::*;

impl<Q: Queue> Connection<'_, Q> {
    pub(super) fn flush(&mut self) -> Result<(), ConnectionError> {
        if self.within.is_some() || self.output.len == 0 {
            return Ok(());
        }
        self.send(None)
    }

    /// Sends `output`, if allowed now, and then the bytes of a slice.
    pub(super) fn send(&mut self, slice: Option<(usize, Use)>) -> Result<(), ConnectionError> {
        let output =
            if self.within.is_some() { &[][..] } else { &self.output.bytes[..self.output.len] };
        let data = slice.map_or(&[][..], |(slice, used)| {
            &self.slices.bytes(slice)[used.start..used.start + used.len]
        });
        let mut parts = [IoSlice::new(output), IoSlice::new(data)];
        let mut parts = &mut parts[..];
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match (&mut &*self.stream).write_vectored(parts) {
                Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.within.is_none() {
            self.output.len = 0;
        }
        Ok(())
    }

    /// Receives available bytes; `false` at the end of the stream.
    pub(super) fn receive(&mut self) -> Result<bool, ConnectionError> {
        let got = self.read()?;
        // A client that has given this connection up may have sent the same writes again on another
        // one, and later writes after them; the bytes that are still here must not undo those. No
        // reply has been sent for them.
        if (self.others)() {
            self.deserted = true;
            if matches!(self.current, Some(Current::Write { .. })) {
                return Err(ConnectionError::Cut);
            }
        }
        Ok(got)
    }

    pub(super) fn read(&mut self) -> Result<bool, ConnectionError> {
        let stream = &mut &*self.stream;
        // The bytes go directly to their place, if the place is known.
        if let Some(Current::Write { large, offset, left, slice: Some((slice, filled)) }) =
            self.current
        {
            let size = left.min(self.slice - split(offset).1);
            let got = read(stream, &mut self.slices.bytes_mut(slice)[filled..size])?;
            let slice = Some((slice, filled + got));
            self.current = Some(Current::Write { large, offset, left, slice });
            return Ok(got > 0);
        }
        let got = read(stream, self.input.back())?;
        self.input.end += got;
        Ok(got > 0)
    }

    /// Sleeps until a request completes or, with `input`, the socket is readable; returns whether
    /// it is. Without `input`, a client that is gone is an error.
    pub(super) fn sleep(&mut self, input: bool) -> Result<bool, ConnectionError> {
        if !self.queue.arm() {
            return Ok(false);
        }
        let queue = PollFd::from_borrowed_fd(self.queue.fd(), PollFlags::IN);
        // Poll always reports a full hang-up.
        let wanted = if input { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [queue, PollFd::new(self.stream, wanted)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if !input && fds[1].revents().contains(PollFlags::HUP) {
            return Err(ConnectionError::Cut);
        }
        Ok(input && !fds[1].revents().is_empty())
    }

    /// Sleeps until a request completes, or briefly.
    pub(super) fn doze(&mut self) {
        if self.queue.arm() {
            let moment = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            // The caller looks again, whatever poll returns.
            let _ = poll(&mut [PollFd::new(&self.queue.fd(), PollFlags::IN)], Some(&moment));
        }
    }
}

fn read(stream: &mut &UnixStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(into) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
