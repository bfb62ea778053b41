//! The tables of docs/figures.md that are made of the published samples.

use report::Data;
use std::path::Path;

const END: &str = "<!-- end of what is computed -->\n";
/// The command that writes them anew.
const REWRITE: &str = "UPDATE_FIGURES=1 cargo test -p report --test figures -- --test-threads 1";

/// Compares what is documented behind the line `begin` with the tables made of the samples in
/// `folder`.
fn same(begin: &str, folder: &str, made: fn(&Data) -> Option<String>) {
    let root = root();
    let data = Data::load(&root.join(folder)).unwrap();
    let made = made(&data).expect("the samples have rows");
    let path = root.join("docs/figures.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(begin).expect("docs/figures.md has the place");
    let (there, after) = rest.split_once(END).expect("docs/figures.md has the end of the place");
    if std::env::var_os("UPDATE_FIGURES").is_some() {
        std::fs::write(&path, format!("{before}{begin}\n{made}\n{END}{after}")).unwrap();
        return;
    }
    assert!(there.trim() == made.trim(), "docs/figures.md is not current; run: {REWRITE}\n{made}");
}

#[test]
fn the_documented_scaling_is_that_of_the_published_samples() {
    let begin = "<!-- computed from docs/report/data/hop.json -->\n";
    same(begin, "docs/report/data", report::scaling);
}

#[test]
fn the_documented_curves_over_threads_are_those_of_the_published_samples() {
    let begin = "<!-- computed from docs/report/threads -->\n";
    same(begin, "docs/report/threads", report::threads);
}

/// The folder of the sources.
fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn the_published_page_is_that_of_the_published_samples() {
    let data = root().join("docs/report/data");
    if std::env::var_os("UPDATE_FIGURES").is_some() {
        report::run::write_page(&data, &root().join("docs/report")).unwrap();
    }
    let made = report::page(&Data::load(&data).unwrap());
    assert!(read("docs/report/index.html") == made, "docs/report is not current; run: {REWRITE}");
}

/// Regression: the page contradicted docs/advise.md on the CPU time that a device saves, and
/// neither said what it counts; and the page's model said nothing of the measurement that refutes
/// it.
#[test]
fn figures_that_stand_in_several_places_are_the_same() {
    let page = read("docs/report/index.html");
    for place in [&page, &read("docs/advise.md"), &read("migrate/advise/src/rules.rs")] {
        assert!(place.contains("0.61") && place.contains("0.24"), "one of them is not there");
    }
    assert!(page.contains("QEMU and relay together took 0.61"));
    assert!(page.contains("The relay alone took 0.31"));
    assert!(page.contains("compares one stream of platen with 8 channels of QEMU"));
    let figures = read("docs/figures.md");
    assert!(figures.contains("| qatzip level 1, device | 0.72 s (0.24) |"));
    for text in [&page, &figures] {
        assert!(text.contains("0.38") && text.contains("0.54"));
    }
    let threads = Data::load(&root().join("docs/report/threads")).unwrap();
    let table = report::threads(&threads).unwrap();
    let row = |line: &&str| line.starts_with("| 1 + 8 | none | 16 | 8 |");
    assert!(table.lines().find(row).unwrap().contains("| 0.38 |"), "{table}");
}
