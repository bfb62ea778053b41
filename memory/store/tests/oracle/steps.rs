//! Operations of several calls: parts of pages, and writeback.

use super::*;

/// Writes a part of a page: the editor gets its contents, and no other write comes between.
pub(super) fn modify(
    worker: &mut Worker,
    oracle: &mut HashMap<u64, Held>,
    index: u64,
    (tag, new): (u8, Vec<u8>),
    word: Option<u64>,
    mem_limit: u64,
) {
    let before = oracle.get(&index).cloned();
    let leave = new.len() % 7 == 0;
    let edit = |page: Page, out: &mut [u8; MAX_OBJECT]| {
        let shown = match page {
            Page::Absent => None,
            Page::Same(word) => Some(Held::Same(word)),
            Page::Object { tag, len } => Some(Held::Object(tag, out[..len].to_vec())),
            other => panic!("page {index} is shown as {other:?}"),
        };
        assert_eq!(shown, before, "page {index}");
        if leave {
            return None;
        }
        out[..new.len()].copy_from_slice(&new);
        Some(word.map_or(Change::Object { tag, len: new.len() }, Change::Same))
    };
    let grouped = matches!(before, Some(Held::Grouped(..)));
    let backed = matches!(before, Some(Held::Backed(..)));
    match worker.modify(index, &mut [0xee; MAX_OBJECT], edit) {
        Ok(()) => {
            assert!(!leave && !grouped && !backed, "page {index} was {before:?}");
            oracle.insert(index, word.map_or(Held::Object(tag, new), Held::Same));
        }
        Err(ModifyError::Left { .. }) => assert!(leave && !grouped && !backed),
        Err(ModifyError::Grouped { .. }) => assert!(grouped),
        Err(ModifyError::Backed { .. }) => assert!(backed),
        Err(ModifyError::Put(PutError::Full { .. })) => {
            assert!(mem_limit > 0, "full without a limit")
        }
        Err(error) => panic!("{error}"),
    }
}

/// Writes pages back, some with wrong expected contents, until the batch is full.
pub(super) fn write_back(
    worker: &mut Worker,
    oracle: &mut HashMap<u64, Held>,
    pages: std::ops::Range<u64>,
    stale: usize,
    batch: &mut Batch,
) {
    let mut expected = Vec::new();
    for (number, index) in pages.enumerate() {
        let (added, tag, mut bytes, group) = match oracle.get(&index) {
            Some(Held::Object(tag, bytes)) => {
                let mut bytes = bytes.clone();
                if number % stale == 0 {
                    bytes[0] ^= 1;
                }
                (batch.add(&Seen { index, tag: *tag, bytes: &bytes }), *tag, bytes, None)
            }
            Some(Held::Grouped(_, payload, position)) => {
                let mut buffer = GroupBuffer::new();
                worker.look_group(index, &mut buffer).unwrap().expect("it is in one");
                // Any bytes will do.
                let bytes = payload[..payload.len().min(100)].to_vec();
                (batch.add_grouped(index, &buffer, 7, &bytes), 7, bytes, Some(*position))
            }
            _ => continue,
        };
        let fits = bytes.len() == MAX_OBJECT || bytes.len() <= 4072;
        match added {
            Added::Full => break,
            Added::Unfit => assert!(!fits),
            Added::Yes if number % stale == 0 && group.is_none() => {}
            Added::Yes => {
                let tag = if bytes.len() == MAX_OBJECT { WHOLE_TAG } else { tag };
                expected.push((index, Held::Backed(tag, std::mem::take(&mut bytes))));
            }
        }
    }
    let (all, blocks) = (batch.len() as u64, batch.blocks() as u64);
    let done = worker.write_back(batch).unwrap();
    assert_eq!(done.pages + done.changed + done.left, all);
    assert!(done.blocks <= blocks && (done.left > 0) == (done.blocks < blocks));
    if done.left == 0 {
        assert_eq!(done.pages, expected.len() as u64);
        oracle.extend(expected);
        return;
    }
    // Pages without a free block stay where they were.
    let mut gone = 0;
    for (index, backed) in expected {
        if worker.peek(index).unwrap().0 == Page::Backed {
            oracle.insert(index, backed);
            gone += 1;
        }
    }
    assert_eq!(gone, done.pages);
}
