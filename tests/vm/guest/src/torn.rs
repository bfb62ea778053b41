//! Recognises a page as it was during its last update.
//!
//! Under TCG every QEMU can lose a write of its guest while it migrates or saves the VM. The vCPU
//! sets the page's dirty bit, and QEMU's migration thread clears the bit and sends the page before
//! the vCPU removes the mark that makes it set that bit again. The rest of the update is then never
//! sent. (docs/migrate.md names this.) The page arrives half updated. A page that platen had lost,
//! delivered late or swapped would be whole: at any moment a guest updates one of its pages.

use std::io;

use crate::pattern::{Corpus, Page, State, MAX_SMALL, PAGE};

/// Whether each byte of the page is one that it had during the update that led to `state`, and some
/// of the update is there.
pub(crate) fn is_torn(corpus: &Corpus, index: u64, state: State, got: &Page) -> io::Result<bool> {
    let mut after = Page([0; PAGE]);
    let mut before = after.clone();
    corpus.expected(index, state, &mut after)?;
    if state.small > 0 {
        corpus.expected(index, State { small: state.small - 1, ..state }, &mut before)?;
        return Ok(is_between(got, &before, &[&after]));
    }
    if state.version == 0 {
        return Ok(false);
    }
    // A rewrite copies a page, changes all of its bytes by a key, and stamps it.
    let mut copied = after.clone();
    let key = corpus.source(index, state.version, &mut copied)?;
    let keyed = Page(copied.0.map(|byte| byte ^ key));
    for small in 0..=MAX_SMALL {
        corpus.expected(index, State { version: state.version - 1, small }, &mut before)?;
        if is_between(got, &before, &[&copied, &keyed, &after]) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether each byte is that of `before` or of one of the later states, and not all are of
/// `before`.
fn is_between(got: &Page, before: &Page, later: &[&Page]) -> bool {
    let known =
        |at: usize| got.0[at] == before.0[at] || later.iter().any(|state| got.0[at] == state.0[at]);
    got.0 != before.0 && (0..got.0.len()).all(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::{apply_small, mix};
    use std::io::Write;

    /// A corpus of 50 pages, all different.
    fn corpus(name: &str) -> Corpus {
        let path = std::env::temp_dir().join(format!("guest-torn-{name}-{}", std::process::id()));
        let mut file = std::fs::File::create(&path).expect("temporary file");
        for page in 0..50_u64 {
            let bytes: Vec<u8> =
                (0..PAGE as u64 / 8).flat_map(|word| mix(page, word, 9).to_le_bytes()).collect();
            file.write_all(&bytes).expect("temporary file");
        }
        let corpus = Corpus::open(path.to_str().expect("utf-8")).expect("just written");
        std::fs::remove_file(&path).expect("just written");
        corpus
    }

    fn page(corpus: &Corpus, index: u64, state: State) -> Page {
        let mut page = Page([0; PAGE]);
        corpus.expected(index, state, &mut page).expect("corpus");
        page
    }

    #[test]
    fn a_page_is_torn_at_every_moment_of_its_rewrite_and_not_before() {
        let (corpus, state) = (corpus("rewrite"), State { version: 7, small: 0 });
        let old = page(&corpus, 3, State { version: 6, small: 5 });
        assert!(!is_torn(&corpus, 3, state, &old).expect("corpus"));
        let mut now = old;
        let mut copied = Page([0; PAGE]);
        let key = corpus.source(3, 7, &mut copied).expect("corpus");
        for half in [PAGE / 2, PAGE] {
            now.0[..half].copy_from_slice(&copied.0[..half]);
            assert!(is_torn(&corpus, 3, state, &now).expect("corpus"));
        }
        for at in [64, PAGE] {
            let begin = if at == 64 { 0 } else { 64 };
            now.0[begin..at].iter_mut().for_each(|byte| *byte ^= key);
            assert!(is_torn(&corpus, 3, state, &now).expect("corpus"), "{at}");
        }
    }

    #[test]
    fn a_page_that_is_whole_or_has_a_foreign_byte_is_not_torn() {
        let (corpus, state) = (corpus("whole"), State { version: 7, small: 2 });
        for other in [
            State { version: 7, small: 1 },
            State { version: 6, small: 2 },
            State { version: 5, small: 0 },
        ] {
            let whole = page(&corpus, 3, other);
            assert!(!is_torn(&corpus, 3, state, &whole).expect("corpus"), "{other:?}");
        }
        let mut torn = page(&corpus, 3, State { version: 7, small: 1 });
        let after = page(&corpus, 3, state);
        let at = (0..PAGE).find(|&at| torn.0[at] != after.0[at]).expect("an update");
        torn.0[at] = after.0[at];
        assert!(is_torn(&corpus, 3, state, &torn).expect("corpus"));
        let far = (at + PAGE / 2) % PAGE;
        torn.0[far] ^= 1;
        assert!(!is_torn(&corpus, 3, state, &torn).expect("corpus"));
        apply_small(3, State { version: 7, small: 3 }, &mut torn);
        assert!(!is_torn(&corpus, 3, state, &torn).expect("corpus"));
    }
}
