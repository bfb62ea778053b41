//! The kernel's netlink messages and an NBD server's hello: read within their bounds, or refused.
//!
//! Input: the attribute to look for (u16), then the bytes, read once as an answer and once as a
//! hello.
#![no_main]

use std::io::{self, Cursor, Read, Write};

use libfuzzer_sys::fuzz_target;
use swap::nbd::fuzzing::{answer, hello};

struct Server<'a>(Cursor<&'a [u8]>, usize);

impl Read for Server<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Server<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1 += bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let [a, b, bytes @ ..] = input else { return };
    match answer(bytes, u16::from_ne_bytes([*a, *b])) {
        Ok((_, found)) => assert!(found.is_none_or(|found| found.len() <= bytes.len())),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let mut server = Server(Cursor::new(bytes), 0);
    match hello(&mut server) {
        Ok(_) => assert!(server.1 == 20 && server.0.position() >= 28),
        Err(error) => assert!(!error.to_string().is_empty() && server.1 <= 20),
    }
});
