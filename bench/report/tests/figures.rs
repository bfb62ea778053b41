//! The tables of docs/figures.md that are made of the published samples.

use report::Data;
use std::path::Path;

const END: &str = "<!-- end of what is computed -->\n";
/// The command that writes them anew.
const REWRITE: &str = "UPDATE_FIGURES=1 cargo test -p report --test figures -- --test-threads 1";

/// Compares what is documented behind the line `begin` with the tables made of the samples in
/// `folder`.
fn same(begin: &str, folder: &str, made: fn(&Data) -> Option<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
