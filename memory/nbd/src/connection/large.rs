//! Large and waiting requests, slice by slice.

use super::*;

impl<Q: Queue> Connection<'_, Q> {
    pub(super) fn skip(&mut self, left: usize) -> Option<Need> {
        let here = left.min(self.input.len());
        self.input.take(here);
        self.current = (left > here).then_some(Current::Skip { left: left - here });
        self.current.map(|_| Need::Input)
    }

    pub(super) fn free_slice(&self) -> Option<usize> {
        self.uses.iter().position(Option::is_none)
    }

    /// Fills slices from the input and submits them.
    pub(super) fn take_in(
        &mut self,
        large: usize,
        offset: u64,
        left: usize,
        slice: Option<(usize, usize)>,
    ) -> Option<Need> {
        let Some((slice, filled)) = slice.or_else(|| Some((self.free_slice()?, 0))) else {
            return Some(Need::Room);
        };
        // All slices but the last end at a page boundary.
        let size = left.min(self.slice - split(offset).1);
        let used = Use {
            large,
            offset,
            start: 0,
            len: size,
            first: false,
            last: size == left,
            over: None,
        };
        self.uses[slice] = Some(used);
        let here = (size - filled).min(self.input.len());
        self.slices.bytes_mut(slice)[filled..filled + here]
            .copy_from_slice(&self.input.front()[..here]);
        self.input.take(here);
        let filled = filled + here;
        if filled < size {
            self.current =
                Some(Current::Write { large, offset, left, slice: Some((slice, filled)) });
            return Some(Need::Input);
        }
        self.current = (left > size).then_some(Current::Write {
            large,
            offset: offset + size as u64,
            left: left - size,
            slice: None,
        });
        let parts = Parts::of(offset, size);
        let patched = parts.patch(self.queue, self.slices.bytes(slice)).map_err(Error::from);
        let of = self.larges[large].as_mut().expect("it is being taken in");
        of.slices += 1;
        of.complete = left == size;
        of.error = of.error.or(patched.err());
        let done = if parts.pages == 0 {
            Some(Ok(()))
        } else {
            let buffer = self.slices.lend(slice, parts.body.clone());
            let pages = u32::try_from(parts.pages).expect("a slice");
            let request = device::Request { op: Op::Write, page: parts.page, pages, buffer };
            self.queue.submit(slice as u64, request)
        };
        if let Some(done) = done {
            self.over(slice, done);
        }
        None
    }

    /// Registers a request that is done in slices.
    pub(super) fn enter(&mut self, cookie: u64, write: bool) -> usize {
        let free = self.larges.iter().position(Option::is_none);
        let large = free.expect("each has a slice, is taken in, or is the first that waits");
        self.larges[large] = Some(Large { cookie, write, slices: 0, complete: false, error: None });
        large
    }

    /// Submits slices of waiting reads; returns whether there were any.
    pub(super) fn give_out(&mut self) -> bool {
        let mut any = false;
        while let Some(&Waiting { cookie, offset, left, large }) = self.waiting.front() {
            let free = self.free_slice().filter(|_| self.outgoing.len() < READS);
            let Some(slice) = free else { break };
            any = true;
            let first = large.is_none();
            let large = large.unwrap_or_else(|| self.enter(cookie, false));
            let (page, at) = split(offset);
            let size = left.min(self.slice - at);
            let last = size == left;
            self.uses[slice] =
                Some(Use { large, offset, start: at, len: size, first, last, over: None });
            let of = self.larges[large].as_mut().expect("it was entered");
            of.slices += 1;
            of.complete = last;
            self.outgoing.push_back(slice);
            if last {
                self.waiting.pop_front();
            } else {
                let (offset, left) = (offset + size as u64, left - size);
                self.waiting[0] = Waiting { cookie, offset, left, large: Some(large) };
            }
            let pages = (at + size).div_ceil(PAGE);
            let buffer = self.slices.lend(slice, 0..pages * PAGE);
            let pages = u32::try_from(pages).expect("a slice");
            let request = device::Request { op: Op::Read, page, pages, buffer };
            if let Some(done) = self.queue.submit(slice as u64, request) {
                self.over(slice, done);
            }
        }
        any
    }

    /// Records that the device no longer uses a slice.
    pub(super) fn over(&mut self, slice: usize, done: Result<(), Errno>) {
        self.slices.give_back(slice);
        let used = self.uses[slice].as_mut().expect("it was submitted");
        used.over = Some(done.map_err(Error::from));
        let Use { large, .. } = *used;
        self.finish_write(large, slice);
    }

    /// Replies to a write whose last slice is complete; returns whether the slice was a write's.
    pub(super) fn finish_write(&mut self, large: usize, slice: usize) -> bool {
        let of = self.larges[large].as_mut().expect("it has slices on the way");
        if !of.write {
            return false;
        }
        let over = self.uses[slice].take().and_then(|used| used.over).expect("it is over");
        of.slices -= 1;
        of.error = of.error.or(over.err());
        if of.complete && of.slices == 0 {
            let Large { cookie, error, .. } = *of;
            self.larges[large] = None;
            self.output.put(&simple_reply(cookie, error));
        }
        true
    }

    /// Records completions; returns whether there were any.
    pub(super) fn reap(&mut self) -> bool {
        let (slices, uses) = (&mut self.slices, &mut self.uses);
        let mut any = false;
        if self.queue.in_flight() > 0 {
            any = self.queue.reap(&mut |tag, result| arrived(slices, uses, tag, result)) > 0;
        }
        // Also those that `now` recorded.
        for slice in 0..SLICES {
            if let Some(Use { large, over: Some(_), .. }) = self.uses[slice] {
                any |= self.finish_write(large, slice);
            }
        }
        any
    }

    /// The first complete slice of a read that may be sent: it is the next of its read, and no
    /// other reply is partly sent.
    pub(super) fn next_to_send(&self) -> Option<usize> {
        let mut behind = [false; LARGES];
        (0..self.outgoing.len()).find(|&at| {
            let used = self.uses[self.outgoing[at]].expect("it is outgoing");
            let turn = !std::mem::replace(&mut behind[used.large], true);
            let others = self.within.is_none_or(|within| within == used.large);
            turn && others && used.over.is_some() && (!used.first || self.may_begin(used.large))
        })
    }

    /// Whether the reply to a read may begin. A simple reply must end before any other reply, so it
    /// waits for as much of the read as there are slices for.
    pub(super) fn may_begin(&self, large: usize) -> bool {
        if self.session.structured {
            return true;
        }
        let complete = self.larges[large].is_some_and(|of| of.complete);
        let of = self.outgoing.iter().filter_map(|&slice| self.uses[slice]);
        let (mut slices, mut over) = (0, 0);
        for used in of.filter(|used| used.large == large) {
            slices += 1;
            over += usize::from(used.over.is_some());
        }
        over == slices && (complete || slices >= READS)
    }

    /// Replies with an error to a read of which nothing was sent, `first` its first slice, if one
    /// of its slices has failed: a simple reply that has begun cannot report an error. Returns whether
    /// it did. All slices of the read that are on the way are complete: see `may_begin`.
    fn refuse_unsent(&mut self, first: usize) -> bool {
        let Some(Use { large, first: true, .. }) = self.uses[first] else { return false };
        if self.session.structured {
            return false;
        }
        let of = |used: Option<Use>| used.filter(|used| used.large == large);
        let slices = self.outgoing.iter().filter_map(|&slice| of(self.uses[slice]));
        let Some(error) = slices.filter_map(|used| used.over?.err()).next() else { return false };
        self.outgoing.retain(|&slice| of(self.uses[slice]).is_none());
        for used in self.uses.iter_mut().filter(|used| of(**used).is_some()) {
            *used = None;
        }
        // The slices of a longer read that were not submitted.
        if self.waiting.front().is_some_and(|waiting| waiting.large == Some(large)) {
            self.waiting.pop_front();
        }
        let Large { cookie, .. } = self.larges[large].take().expect("it has slices");
        self.output.put(&simple_reply(cookie, Some(error)));
        true
    }

    /// Sends complete slices of reads in turn; returns whether there were any.
    pub(super) fn send_slices(&mut self) -> Result<bool, ConnectionError> {
        let mut any = false;
        while let Some(at) = self.next_to_send() {
            if self.refuse_unsent(self.outgoing[at]) {
                any = true;
                continue;
            }
            let Some(slice) = self.outgoing.remove(at) else { unreachable!("it is outgoing") };
            let Some((used, over)) = self.uses[slice].and_then(|used| Some((used, used.over?)))
            else {
                unreachable!("it is over")
            };
            any = true;
            let of = self.larges[used.large].as_mut().expect("it has slices on the way");
            of.slices -= 1;
            let cookie = of.cookie;
            of.error = of.error.or(over.err());
            let error = of.error;
            if self.session.structured {
                if over.is_ok() {
                    let last = used.last && error.is_none();
                    let length = u32::try_from(used.len).expect("a slice");
                    self.output.put(&data_chunk(cookie, last, used.offset, length));
                    self.send(Some((slice, used)))?;
                }
                if let Some(error) = error.filter(|_| used.last) {
                    self.output.put(&error_chunk(cookie, error));
                }
            } else {
                match error {
                    None => {
                        if used.first {
                            self.output.put(&simple_reply(cookie, None));
                        }
                        self.send(Some((slice, used)))?;
                        self.within = (!used.last).then_some(used.large);
                    }
                    Some(_) => return Err(ConnectionError::Late { offset: used.offset }),
                }
            }
            if used.last {
                self.larges[used.large] = None;
            }
            self.uses[slice] = None;
        }
        Ok(any)
    }
}
