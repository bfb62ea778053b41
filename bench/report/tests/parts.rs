//! Parts of the page: swap-ins, a fast link, and the verdicts of all sections.

mod pages;

use std::fs;

use pages::{copy, page_of, samples, select, set, sound, text_of, SECTIONS};
use serde_json::{json, Value};

#[test]
fn swap_ins_are_a_table_and_two_figures() {
    let folder = copy();
    let row = |name: &str, runs: Value| json!({"name": name, "runs": runs});
    let samples = json!({"columns": ["p50_ns", "p99_ns", "p999_ns"], "rows": [
        row("zram, lz4, 1 thread", json!([[22_000, 158_000, 320_000], [26_000, 150_000, 400_000]])),
        row("zswap, lz4, 1 thread", json!([[28_000, 318_000, 3_259_000]])),
        row("platen, ublk, lz4, 1 thread", json!([[277_000, 7_951_000, 8_911_000]])),
    ]});
    fs::write(folder.path().join("swap.json"), samples.to_string()).unwrap();
    set(folder.path(), |record| {
        let steps = record["steps"].as_array_mut().unwrap();
        let swap = steps.iter_mut().find(|step| step["name"] == "swap").unwrap();
        swap["state"] = json!("done");
    });
    let page = sound(&page_of(folder.path()));
    assert!(select(&page, "#swap .missing").is_empty());
    assert_eq!(select(&page, "#swap svg").len(), 2);
    assert_eq!(select(&page, "#swap tr.other").len(), 2);
    let others = text_of(&page, "#swap tr.other");
    assert!(others.contains("24") && others.contains("(22 to 26)"), "{others}");
    let ours = text_of(&page, "#swap tr.platen");
    for words in ["platen, ublk, lz4, 1 thread", "277", "7,951", "8,911"] {
        assert!(ours.contains(words), "no {words} in {ours}");
    }
}

#[test]
fn a_fast_link_decides_whether_compression_pays_there() {
    let verdict = |methods: &[(&str, u64)]| {
        let folder = copy();
        let method = |(name, ms): &(&str, u64)| json!({"name": name, "did-not-end": 0, "failures": [], "runs": [{"total-time": ms}]});
        let methods: Vec<Value> = methods.iter().map(method).collect();
        let samples =
            json!({"link-mbit": 10_000, "data-mib": 600, "dirty": [], "methods": methods});
        fs::write(folder.path().join("links.json"), samples.to_string()).unwrap();
        let page = sound(&page_of(folder.path()));
        let findings = select(&page, "#qatzip .findings li").into_iter();
        let texts = findings.map(|finding| finding.text().collect::<String>());
        texts.into_iter().find(|text| text.starts_with("Where the network is not")).unwrap()
    };
    let slower = verdict(&[("qemu", 1000), ("platen-default", 1300)]);
    let words = "Confirmed here. Over a link of 10000 Mbit/s platen's default took 1.30 of QEMU's";
    assert!(slower.contains(words), "{slower}");
    let faster = verdict(&[("qemu", 1000), ("platen-default", 800)]);
    assert!(faster.contains("Contradicted here") && faster.contains("0.80"), "{faster}");
    let alone = verdict(&[("qemu", 1000)]);
    assert!(alone.contains("Open. The migrations over a fast link are missing"), "{alone}");
}

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
