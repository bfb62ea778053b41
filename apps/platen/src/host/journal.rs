//! Messages about a migration. In the journal they have fields: `journalctl PLATEN_VM=g1`.
//!
//! A service manager sets `JOURNAL_STREAM` if standard error goes to the journal. A message then
//! goes to the journal's own socket, as a datagram of fields. If that fails, it goes to standard
//! error.

use crate::say::{printable, say};
use host::Record;
use rustix::fd::BorrowedFd;
use rustix::fs::fstat;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// The socket at which the journal takes datagrams.
const SOCKET: &str = "/run/systemd/journal/socket";
/// The most bytes of a message: a cause has 2000, and a datagram has to fit the socket's buffer.
const MOST: usize = 16 << 10;
/// `LOG_INFO`.
const PRIORITY: &str = "6";

/// Prints a message about a migration.
pub(super) fn say_of(record: &Record, text: &str) {
    let stream = std::env::var("JOURNAL_STREAM").ok();
    let stderr = rustix::stdio::stderr();
    if !is_read_by_journal(stream.as_deref(), stderr) || !send(Path::new(SOCKET), record, text) {
        say(text);
    }
}

/// Whether this file is the one that `JOURNAL_STREAM` names: standard error may have been
/// redirected.
fn is_read_by_journal(stream: Option<&str>, file: BorrowedFd<'_>) -> bool {
    let Ok(found) = fstat(file) else { return false };
    stream.is_some_and(|named| named == format!("{}:{}", found.st_dev, found.st_ino))
}

/// Sends a message without waiting. Returns whether the journal took it.
fn send(socket: &Path, record: &Record, text: &str) -> bool {
    let Ok(journal) = UnixDatagram::unbound() else { return false };
    let sent = journal.set_nonblocking(true).and_then(|()| {
        let bytes = entry(record, text);
        journal.send_to(&bytes, socket)
    });
    sent.is_ok()
}

/// Encodes the fields of a message in the journal's form: a name, the length of the value, the
/// value.
fn entry(record: &Record, text: &str) -> Vec<u8> {
    let text = printable(text);
    let mut end = text.len().min(MOST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let message = format!("platen: {}", &text[..end]);
    let place = record.place().to_string();
    let port = record.place().port().to_string();
    let fields = [
        ("MESSAGE", Some(message.as_str())),
        ("PRIORITY", Some(PRIORITY)),
        ("SYSLOG_IDENTIFIER", Some("platen")),
        ("PLATEN_MIGRATION", Some(&record.id)),
        ("PLATEN_ROLE", Some(record.role.name())),
        ("PLATEN_VM", record.vm.as_deref()),
        ("PLATEN_HOST", Some(&record.peer)),
        ("PLATEN_PLACE", Some(&place)),
        ("PLATEN_PORT", Some(&port)),
        ("PLATEN_PHASE", Some(record.phase.name())),
        ("PLATEN_STATUS", record.status.map(host::Status::name)),
        ("PLATEN_CAUSE", record.cause.as_deref()),
    ];
    let mut bytes = Vec::new();
    for (name, value) in fields {
        let Some(value) = value else { continue };
        bytes.extend(name.as_bytes());
        bytes.push(b'\n');
        bytes.extend((value.len() as u64).to_le_bytes());
        bytes.extend(value.as_bytes());
        bytes.push(b'\n');
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Place, Status};
    use std::collections::HashMap;
    use std::os::fd::AsFd;

    fn record() -> Record {
        Record {
            id: "1-2-3".into(),
            peer: "b".into(),
            place: Some(Place::Door(49152)),
            vm: Some("g1\nMESSAGE=forged".into()),
            status: Some(Status::Failed),
            cause: Some("a reason".into()),
            ..Record::default()
        }
    }

    /// Parses a datagram as the journal does.
    fn fields(mut bytes: &[u8]) -> HashMap<String, String> {
        let mut found = HashMap::new();
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
            let name = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let len = u64::from_le_bytes(bytes[end + 1..end + 9].try_into().unwrap());
            let len = usize::try_from(len).unwrap();
            let value = &bytes[end + 9..end + 9 + len];
            assert_eq!(bytes[end + 9 + len], b'\n');
            found.insert(name, String::from_utf8(value.to_vec()).unwrap());
            bytes = &bytes[end + 10 + len..];
        }
        found
    }

    #[test]
    fn a_message_has_fields_and_no_name_forges_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert!(!send(&path, &record(), "nobody is there"));
        let journal = UnixDatagram::bind(&path).unwrap();
        let long = "\u{fc}".repeat(MOST);
        assert!(send(&path, &record(), &long));
        let mut bytes = vec![0; 64 << 10];
        let got = journal.recv(&mut bytes).unwrap();
        let found = fields(&bytes[..got]);
        for (name, value) in [
            ("PLATEN_VM", "g1\nMESSAGE=forged"),
            ("PLATEN_HOST", "b"),
            ("PLATEN_PORT", "49152"),
            ("PLATEN_PLACE", "door:49152"),
            ("PLATEN_PHASE", "opening"),
            ("PLATEN_STATUS", "failed"),
            ("PLATEN_CAUSE", "a reason"),
        ] {
            assert_eq!(found[name], value);
        }
        assert_eq!(found["MESSAGE"].len(), "platen: ".len() + MOST);
    }

    #[test]
    fn only_the_file_that_is_named_is_the_journal_s() {
        let file = tempfile::tempfile().unwrap();
        let found = fstat(&file).unwrap();
        let named = format!("{}:{}", found.st_dev, found.st_ino);
        assert!(is_read_by_journal(Some(&named), file.as_fd()));
        assert!(!is_read_by_journal(Some("1:1"), file.as_fd()));
        assert!(!is_read_by_journal(None, file.as_fd()));
    }
}
