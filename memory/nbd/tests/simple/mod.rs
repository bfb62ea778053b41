//! The simplest client: simple replies, as the kernel's has them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Goes in by `NBD_OPT_EXPORT_NAME`.
pub(crate) fn client(path: &Path, patience: Duration) -> UnixStream {
    greeted(UnixStream::connect(path).unwrap(), patience)
}

pub(crate) fn greeted(mut stream: UnixStream, patience: Duration) -> UnixStream {
    stream.set_read_timeout(Some(patience)).unwrap();
    stream.set_write_timeout(Some(patience)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&[0, 0, 0, 3], &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// A request's header, and what is to be written.
pub(crate) fn request(kind: u8, cookie: u64, offset: usize, len: usize, bytes: &[u8]) -> Vec<u8> {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend([0, 0, 0, kind]);
    request.extend(cookie.to_be_bytes());
    request.extend((offset as u64).to_be_bytes());
    request.extend(u32::try_from(len).unwrap().to_be_bytes());
    request.extend(bytes);
    request
}
