//! A backing device in memory.

use std::io;
use std::sync::{Arc, Mutex};

use store::{Block, Disk};

/// Clones share the same blocks.
#[derive(Clone, Debug)]
pub struct Memory(pub Arc<Mutex<Vec<Block>>>);

impl Memory {
    /// A device of `blocks` blocks of zeros.
    pub fn of(blocks: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![Block::ZERO; blocks])))
    }
}

impl Disk for Memory {
    fn blocks(&self) -> io::Result<u64> {
        Ok(self.0.lock().expect("no panic").len() as u64)
    }
    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        let blocks = self.0.lock().expect("no panic");
        let from = blocks.get(block as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.0 = from.0;
        Ok(())
    }
    fn write(&self, block: u32, from: &[Block]) -> io::Result<()> {
        let mut blocks = self.0.lock().expect("no panic");
        let to = blocks.get_mut(block as usize..block as usize + from.len());
        to.ok_or(io::Error::from_raw_os_error(28))?.clone_from_slice(from);
        Ok(())
    }
    fn free(&self) -> Option<u64> {
        None
    }
    fn is_direct(&self) -> bool {
        true
    }
}
