//! An NBD client with several single-page requests in flight, for real pages: fio generates its
//! data.

use super::PAGE;
use anyhow::{bail, ensure, Context};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const HANDSHAKE: usize = 8 + 8 + 2;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const EXPORT_NAME: u32 = 1;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY: usize = 16;

/// Client and server both support omitting the zeroes after the export's size.
const NO_ZEROES: u32 = 1 << 1;
const FIXED: u32 = 1;

pub(super) struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects with the oldest handshake, which every server supports: replies are simple ones.
    pub(super) fn new(socket: &Path) -> anyhow::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut hello = [0; HANDSHAKE];
        stream.read_exact(&mut hello)?;
        ensure!(hello[8..16] == OPTION_MAGIC.to_be_bytes(), "no newstyle server");
        let mut ours = (FIXED | NO_ZEROES).to_be_bytes().to_vec();
        ours.extend(OPTION_MAGIC.to_be_bytes());
        ours.extend(EXPORT_NAME.to_be_bytes());
        ours.extend(0_u32.to_be_bytes());
        stream.write_all(&ours)?;
        // Size and flags, and 124 zeroes if the server cannot omit them.
        let offers = hello[17] & NO_ZEROES.to_le_bytes()[0] != 0;
        let mut export = vec![0; if offers { 10 } else { 134 }];
        stream.read_exact(&mut export)?;
        Ok(Self { stream })
    }

    /// One request for each page of `order`, `depth` of them in flight: writes of `pages`, or reads
    /// that are compared with them. Returns the time of each in microseconds.
    pub(super) fn run(
        &mut self,
        pages: &[u8],
        order: &[u64],
        write: bool,
        depth: usize,
    ) -> anyhow::Result<Vec<f32>> {
        let page = |number: u64| {
            let at = usize::try_from(number).expect("in memory") * PAGE;
            &pages[at..at + PAGE]
        };
        let mut times = Vec::with_capacity(order.len());
        // By cookie: the page, and the time of its request.
        let mut slots: Vec<(u64, Instant)> = vec![(0, Instant::now()); depth];
        let mut free: Vec<usize> = (0..depth).collect();
        let mut next = order.iter();
        let mut request = Vec::with_capacity(28 + PAGE);
        let mut answer = [0; PAGE];
        while times.len() < order.len() {
            if let Some(slot) = free.pop() {
                if let Some(&number) = next.next() {
                    slots[slot] = (number, Instant::now());
                    request.clear();
                    request.extend(REQUEST_MAGIC.to_be_bytes());
                    request.extend(u32::from(write).to_be_bytes());
                    request.extend((slot as u64).to_be_bytes());
                    request.extend((number * PAGE as u64).to_be_bytes());
                    request.extend(u32::try_from(PAGE)?.to_be_bytes());
                    if write {
                        request.extend_from_slice(page(number));
                    }
                    self.stream.write_all(&request)?;
                    continue;
                }
            }
            let mut head = [0; REPLY];
            self.stream.read_exact(&mut head).context("an answer")?;
            ensure!(head[..4] == REPLY_MAGIC.to_be_bytes(), "no answer of NBD's");
            let error = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
            ensure!(error == 0, "the server answers with error {error}");
            let slot = usize::from(head[15]);
            let Some(&(number, began)) = slots.get(slot) else { bail!("an answer to nothing") };
            if !write {
                self.stream.read_exact(&mut answer)?;
                ensure!(answer == page(number), "page {number} has another content");
            }
            times.push(began.elapsed().as_secs_f32() * 1e6);
            free.push(slot);
        }
        Ok(times)
    }
}
