//! Pages of the small samples, to be looked at.

use std::fs;
use std::path::{Path, PathBuf};

use report::Data;
use scraper::{Html, Selector};
use serde_json::Value;
use tempfile::TempDir;

/// The sections, in order.
pub(crate) const SECTIONS: [&str; 9] =
    ["overview", "qatzip", "compress", "qzram", "threads", "swap", "advise", "scaling", "samples"];

/// The folder of the samples.
pub(crate) fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/samples")
}

/// A folder with the samples, to be damaged.
pub(crate) fn copy() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(samples()).unwrap().flatten() {
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// Changes the record of a folder.
pub(crate) fn set(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("run.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut record);
    fs::write(&path, record.to_string()).unwrap();
}

/// The page of a folder.
pub(crate) fn page_of(folder: &Path) -> String {
    report::page(&Data::load(folder).unwrap())
}

/// The elements that a selector means.
pub(crate) fn select<'a>(page: &'a Html, what: &str) -> Vec<scraper::ElementRef<'a>> {
    page.select(&Selector::parse(what).unwrap()).collect()
}

/// The page, parsed; it must have all sections and no error, and ask for nothing.
pub(crate) fn sound(text: &str) -> Html {
    let page = Html::parse_document(text);
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    let ids: Vec<_> =
        select(&page, "main > section").iter().map(|section| section.attr("id").unwrap()).collect();
    assert_eq!(ids, SECTIONS);
    for outside in ["http:", "https:", "//cdn", "<script", "<img", "<link", "@import"] {
        assert!(!text.contains(outside), "the page has {outside}");
    }
    // `url(` only of the hatches within the page.
    assert_eq!(text.matches("url(").count(), text.matches("url(#hatch-").count());
    for reference in select(&page, "[href], [src]") {
        let to = reference.attr("href").or(reference.attr("src")).unwrap();
        assert!(to.starts_with('#'), "the page refers to {to}");
    }
    page
}

/// Their text.
pub(crate) fn text_of(page: &Html, what: &str) -> String {
    select(page, what).iter().flat_map(|element| element.text()).collect::<Vec<_>>().join(" ")
}
