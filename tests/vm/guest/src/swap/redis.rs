//! `redis-fill SOCKET keys=N [size=B] [from=K] [named=1]` and `redis-check SOCKET keys=N [size=B]
//! [named=1]`: a client that stores values computed from their keys' numbers, and compares every
//! byte of every value that it reads back. Values are the contents of [`content`](super::content),
//! or records with long names.

use super::content;
use super::{option, Failure};
use crate::pattern::PAGE;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Requests in flight at a time.
const BATCH: u64 = 16;

/// Stores keys, and prints how many it stored, also if the server fails or ends.
pub(crate) fn fill(socket: &str, words: &[&str]) -> Result<String, Failure> {
    let (keys, size) = (option(words, "keys", 1000)?, size(words)?);
    let (from, named) = (option(words, "from", 0)?, option(words, "named", 0)? == 1);
    let begin = Instant::now();
    let mut server = Server::connect(socket)?;
    let mut value = vec![0; size];
    let mut stored = from;
    let mut last = Instant::now();
    while stored < keys {
        let batch = BATCH.min(keys - stored);
        for key in stored..stored + batch {
            make(key, named, &mut value);
            let head =
                format!("*3\r\n$3\r\nSET\r\n${}\r\n{}\r\n${size}\r\n", name(key).len(), name(key));
            server.send(head.as_bytes());
            server.send(&value);
            server.send(b"\r\n");
        }
        let answered =
            server.flush().and_then(|()| (0..batch).try_for_each(|_| server.expect_ok()));
        if let Err(Failure::Cannot(why)) = answered {
            return Ok(format!("ended keys={stored} ms={} why={why}", begin.elapsed().as_millis()));
        }
        stored += batch;
        if last.elapsed().as_secs() >= 1 {
            println!("beat stored={stored} ms={}", begin.elapsed().as_millis());
            let _ = std::io::stdout().flush();
            last = Instant::now();
        }
    }
    Ok(format!("ok keys={stored} ms={}", begin.elapsed().as_millis()))
}

/// Reads keys 0 to N-1 back and compares; says each second how many.
pub(crate) fn check(socket: &str, words: &[&str]) -> Result<String, Failure> {
    let (keys, size) = (option(words, "keys", 1000)?, size(words)?);
    let named = option(words, "named", 0)? == 1;
    let begin = Instant::now();
    let mut server = Server::connect(socket)?;
    let (mut expected, mut got) = (vec![0; size], vec![0; size]);
    let mut checked = 0;
    let mut last = Instant::now();
    while checked < keys {
        let batch = BATCH.min(keys - checked);
        for key in checked..checked + batch {
            server.send(
                format!("*2\r\n$3\r\nGET\r\n${}\r\n{}\r\n", name(key).len(), name(key)).as_bytes(),
            );
        }
        server.flush()?;
        for key in checked..checked + batch {
            server.value(&mut got)?;
            make(key, named, &mut expected);
            if let Some(at) = expected.iter().zip(&got).position(|(a, b)| a != b) {
                return Err(Failure::Wrong(format!(
                    "value of key {key} differs at byte {at} of {size}"
                )));
            }
        }
        checked += batch;
        if last.elapsed().as_secs() >= 1 {
            println!("beat read={checked} ms={}", begin.elapsed().as_millis());
            let _ = std::io::stdout().flush();
            last = Instant::now();
        }
    }
    Ok(format!("ok keys={checked} ms={}", begin.elapsed().as_millis()))
}

fn size(words: &[&str]) -> Result<usize, Failure> {
    let size = option(words, "size", 4000)?;
    usize::try_from(size)
        .ok()
        .filter(|size| (1..=PAGE).contains(size))
        .ok_or_else(|| Failure::Cannot(format!("values of {size} bytes, they have 1 to {PAGE}")))
}

fn name(key: u64) -> String {
    format!("key:{key:08}")
}

fn make(key: u64, named: bool, value: &mut [u8]) {
    let mut page = [0; PAGE];
    if named {
        content::fill_named(99, key, &mut page);
    } else {
        content::fill(99, key, 1, &mut page);
    }
    value.copy_from_slice(&page[..value.len()]);
}

struct Server {
    reader: BufReader<UnixStream>,
    out: Vec<u8>,
    line: String,
}

impl Server {
    fn connect(socket: &str) -> Result<Self, Failure> {
        let stream = UnixStream::connect(socket)?;
        Ok(Self { reader: BufReader::new(stream), out: Vec::new(), line: String::new() })
    }

    fn send(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.reader.get_mut().write_all(&self.out)?;
        self.out.clear();
        Ok(())
    }

    fn read_line(&mut self) -> Result<&str, Failure> {
        self.line.clear();
        if self.reader.read_line(&mut self.line)? == 0 {
            return Err(Failure::Cannot("redis closed the connection".into()));
        }
        Ok(self.line.trim_end())
    }

    fn expect_ok(&mut self) -> Result<(), Failure> {
        match self.read_line()? {
            "+OK" => Ok(()),
            other => Err(Failure::Cannot(format!("redis says {other}"))),
        }
    }

    fn value(&mut self, value: &mut [u8]) -> Result<(), Failure> {
        let wanted = format!("${}", value.len());
        let head = self.read_line()?;
        if head == "$-1" {
            return Err(Failure::Wrong("a key is gone".into()));
        }
        if head != wanted {
            return Err(Failure::Cannot(format!("redis says {head}")));
        }
        self.reader.read_exact(value)?;
        let mut end = [0; 2];
        self.reader.read_exact(&mut end)?;
        Ok(())
    }
}
