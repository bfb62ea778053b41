//! Files that other processes rename or remove while a collection looks at them.

use crate::rewrite::Rewrite;
use crate::HotSet;

use super::*;

/// Calls `work` when the removal of `path` is the next step.
fn before_the_removal_of(path: PathBuf, work: impl Fn(&Path) + 'static) {
    steps::at_names(Some(Box::new(move |kind, at| {
        if kind == Step::Unlink && at == path {
            work(at);
        }
    })));
}

/// Regression: a collection ended with an error if a player gave a hot set its name meanwhile, or
/// another host removed a pack.
#[test]
fn a_file_that_is_gone_before_its_removal_does_not_end_a_collection() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    run(&store, &Op::Save("a", None, (0..40).map(page).collect())).unwrap();
    let hot = HotSet::path(&store.path("a").unwrap());
    let partial = store.folder().join(format!("..a.hot{PARTIAL}1-0"));
    std::fs::write(&partial, b"").unwrap();
    let renamed = hot.clone();
    before_the_removal_of(partial.clone(), move |partial| {
        std::fs::rename(partial, &renamed).unwrap();
    });
    let done = store.collect(options());
    assert!(done.unwrap().packs == 0 && !partial.exists() && hot.exists());
    // One unused pack is gone before its removal, the others are removed.
    store.remove("a").unwrap();
    let before = packs(&store);
    let pack = std::fs::read_dir(store.folder().join("packs")).unwrap().next().unwrap().unwrap();
    before_the_removal_of(pack.path(), |pack| std::fs::remove_file(pack).unwrap());
    let done = store.collect(options());
    steps::at_names(None);
    assert_eq!(done.unwrap().packs, before as u64 - 1);
    assert!(before > 1 && packs(&store) == 0);
}

/// Regression: a collection ended with an error if another process removed a save that was about to
/// be rewritten.
#[test]
fn a_save_that_is_gone_before_it_is_rewritten_does_not_end_a_collection() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let outcome = store.rewrite("gone", &HashSet::new(), None, options());
    assert!(matches!(outcome, Ok(Rewrite::InUse)));
}
