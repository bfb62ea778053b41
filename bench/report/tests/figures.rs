//! The tables of docs/figures.md that are computed from the published samples.

use report::Data;
use std::path::Path;

const BEGIN: &str = "<!-- computed from docs/report/data/hop.json -->\n";
const END: &str = "<!-- end of what is computed -->\n";
/// The command that writes them anew.
const REWRITE: &str = "UPDATE_FIGURES=1 cargo test -p report --test figures";

#[test]
fn the_documented_scaling_is_that_of_the_published_samples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let data = Data::load(&root.join("docs/report/data")).unwrap();
    let made = report::scaling(&data).expect("hop.json has rows with TLS");
    let path = root.join("docs/figures.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("docs/figures.md has the place");
    let (there, after) = rest.split_once(END).expect("docs/figures.md has the end of the place");
    if std::env::var_os("UPDATE_FIGURES").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}\n{made}\n{END}{after}")).unwrap();
        return;
    }
    assert!(there.trim() == made.trim(), "docs/figures.md is not current; run: {REWRITE}\n{made}");
}
