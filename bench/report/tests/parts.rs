//! Parts of the page: the verdicts of all sections.

mod pages;

use pages::{page_of, samples, select, sound, text_of, SECTIONS};

/// Regression: the page answered neither whether the documents' claims are true nor whether platen
/// beats them in one place.
#[test]
fn the_verdicts_of_all_sections_stand_first_in_one_place() {
    let page = sound(&page_of(&samples()));
    let findings = select(&page, ".findings li").len();
    assert_eq!(select(&page, "#overview .verdicts tbody tr").len(), findings);
    for verdict in ["confirmed", "contradicted", "open"] {
        let count = |what: &str| select(&page, &format!("{what}.{verdict}")).len();
        assert_eq!(count(".verdicts tr"), count(".findings li"), "{verdict}");
    }
    let first = text_of(&page, "#overview figure:first-of-type figcaption");
    assert!(first.starts_with("Are the documents' claims true?"), "{first}");
    let row = |claim: &str| {
        let rows = select(&page, ".verdicts tr").into_iter();
        let texts = rows.map(|row| row.text().collect::<Vec<_>>().join(" | "));
        texts.into_iter().find(|text| text.starts_with(claim)).unwrap()
    };
    let zstd = row("Where the network is the limit");
    let words = "| zstd took 0.44 of the time of none | 0.48 | confirmed |";
    assert!(zstd.contains(words), "{zstd}");
    // The pool was measured on a busy machine.
    let rings = row("Rings without locks");
    assert!(rings.contains(", on a busy machine") && rings.contains("1.79 to 15.55"), "{rings}");
    assert!(row("platen with zstd over 8 channels").contains("QATzip took 0.82"));
    for link in select(&page, ".verdicts a") {
        assert!(SECTIONS.iter().any(|id| link.attr("href") == Some(&format!("#{id}"))));
    }

    // Without any samples each claim is there, and open.
    let folder = tempfile::tempdir().unwrap();
    let page = sound(&page_of(folder.path()));
    assert_eq!(select(&page, ".verdicts tr.open").len(), findings);
}
