//! Finds the end of the device state, and checks that it is complete.

use serde_json::Value;

/// The byte before a section's id at the end of the section (`QEMU_VM_SECTION_FOOTER`).
pub(crate) const FOOTER: u8 = 0x7e;

/// Device sections and the vmdescription that follows them.
#[derive(Debug)]
pub(crate) struct Tail {
    pub(crate) devices: Vec<u8>,
    pub(crate) description: Vec<u8>,
}

/// Collects bytes until they end with a vmdescription that matches them.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    bytes: Vec<u8>,
    /// Bytes before this offset were searched for marks.
    searched: usize,
    /// The last mark, if all bytes searched since then may belong to a description. An earlier mark
    /// cannot be the right one: a mark begins with a zero byte, which no description contains.
    mark: Option<Mark>,
}

/// The beginning of a possible description.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Offset of the mark.
    at: usize,
    /// End of the description that the mark announces.
    end: usize,
}

/// A mark: `00 06`, the length in four bytes, and the opening brace of the JSON.
const MARK_LEN: usize = 7;

impl Collector {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        while self.searched + MARK_LEN <= self.bytes.len() {
            let at = self.searched;
            if let [0x00, 0x06, a, b, c, d, b'{'] = self.bytes[at..at + MARK_LEN] {
                let len = u32::from_be_bytes([a, b, c, d]) as usize;
                self.mark = Some(Mark { at, end: (at + MARK_LEN - 1).saturating_add(len) });
            } else if self.bytes[at] < b' ' {
                // QEMU writes its JSON in one line, with control characters escaped. The mark's own
                // bytes are no JSON yet.
                self.mark = self.mark.filter(|mark| at < mark.at + MARK_LEN - 1);
            }
            self.searched += 1;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The device state, if it is complete. The description also covers `early`, the sections
    /// before the pages.
    pub(crate) fn whole(&self, early: &[u8]) -> Option<Tail> {
        let Mark { at, .. } = self.mark.filter(|mark| mark.end == self.bytes.len())?;
        let (devices, description) = (&self.bytes[..at], &self.bytes[at + MARK_LEN - 1..]);
        describes(description, early, devices)
            .then(|| Tail { devices: devices.to_vec(), description: description.to_vec() })
    }
}

/// Whether `description` is a vmdescription whose devices are all in the state, in order, and
/// whether the state ends with the footer of the last device. A guest chooses some bytes of the
/// state, and a description among them has to be distinguished from the real one.
fn describes(description: &[u8], early: &[u8], devices: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(description) else { return false };
    let Some(listed) = value["devices"].as_array() else { return false };
    let (mut early, mut rest) = (early, devices);
    let mut last = None;
    let found = listed.iter().all(|device| {
        let (Some(name), Some(instance)) =
            (device["name"].as_str(), device["instance_id"].as_i64())
        else {
            return false;
        };
        let Ok(len) = u8::try_from(name.len()) else { return false };
        // The instance has four bytes, as in the head of a section.
        let instance = &instance.to_be_bytes()[4..];
        let head = [&[len], name.as_bytes(), instance].concat();
        if skip_past(&mut early, &head).is_some() {
            return true;
        }
        last = skip_past(&mut rest, &head);
        last.is_some()
    });
    // A section's id precedes its name, and its footer repeats it.
    let id = last.and_then(|before| before.last_chunk::<4>());
    let footer = id.map(|id| [&[FOOTER], &id[..]].concat());
    found && footer.is_some_and(|footer| devices.ends_with(&footer))
}

/// Advances `bytes` past the first occurrence of `head`, and returns the bytes before it; `None` if
/// there is none.
fn skip_past<'a>(bytes: &mut &'a [u8], head: &[u8]) -> Option<&'a [u8]> {
    let at = bytes.windows(head.len()).position(|window| window == head)?;
    let before = &bytes[..at];
    *bytes = &bytes[at + head.len()..];
    Some(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(name: &str, instance: u32, body: &[u8]) -> Vec<u8> {
        let len = u8::try_from(name.len()).unwrap();
        let head = [&[4, 0, 0, 0, 9, len], name.as_bytes(), &instance.to_be_bytes()].concat();
        [&head, &[0, 0, 0, 1][..], body, &[FOOTER, 0, 0, 0, 9]].concat()
    }

    fn description(text: &str) -> Vec<u8> {
        let len = u32::try_from(text.len()).unwrap();
        [&[0, 6], &len.to_be_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn the_end_is_found_however_the_bytes_come_and_not_before() {
        let fake = description(r#"{"devices": [{"name": "no", "instance_id": 0}]}"#);
        let devices = [section("timer", 0, &fake), section("cpu", 1, b"state")].concat();
        let text = r#"{"devices": [{"name": "timer", "instance_id": 0}, {"name": "cpu", "instance_id": 1}]}"#;
        let stream = [&devices[..], &description(text)].concat();
        for size in [1, 3, 1000] {
            let mut collector = Collector::default();
            for (at, piece) in stream.chunks(size).enumerate() {
                assert!(collector.whole(b"").is_none(), "whole after {at} pieces of {size}");
                collector.push(piece);
            }
            let tail = collector.whole(b"").unwrap();
            assert_eq!(
                (tail.devices, tail.description),
                (devices.clone(), text.as_bytes().to_vec())
            );
        }
    }

    #[test]
    fn a_state_that_lacks_a_described_device_is_not_whole() {
        let text = r#"{"devices": [{"name": "early", "instance_id": 0}, {"name": "cpu", "instance_id": 1}]}"#;
        let whole = |devices: &[u8], early: &[u8]| {
            let mut collector = Collector::default();
            collector.push(&[devices, &description(text)].concat());
            collector.whole(early).is_some()
        };
        let (early, cpu) = (section("early", 0, b""), section("cpu", 1, b"x"));
        assert!(whole(&cpu, &early) && whole(&[&early[..], &cpu].concat(), b""));
        assert!(!whole(&cpu, b"") && !whole(&early, b"") && !whole(b"", &early));
        assert!(!whole(&section("cpu", 2, b"x"), &early));
    }

    #[test]
    fn a_description_that_a_guest_made_is_none() {
        let forged = [
            r#"{"devices": []}"#,
            r#"{"devices": [{"name": "timer", "instance_id": 0}]}"#,
            r#"{"devices": [{"name": "timer", "instance_id": 0}, {"name": "gpu", "instance_id": 0}]}"#,
        ];
        let mut collector = Collector::default();
        collector.push(&section("timer", 0, b"x"));
        collector.push(b"\x04\0\0\0\x0a\x03gpu\0\0\0\0\0\0\0\x01");
        for text in forged {
            collector.push(&description(text));
            assert!(collector.whole(b"").is_none(), "{text}");
        }
        // Marks of descriptions that are longer than what follows.
        collector.push(&b"\0\x06\0\0\xff\xff{".repeat(1000));
        collector.push(&[FOOTER, 0, 0, 0, 10]);
        collector.push(&description(forged[2]));
        assert!(collector.whole(b"").is_some());
    }
}
