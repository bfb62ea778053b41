//! Pages made from small samples (invented for these tests, and no measurements), and from samples
//! that are missing, damaged or too large.

mod pages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pages::{copy, page_of, samples, select, set, sound, text_of};
use proptest::prelude::*;
use scraper::Selector;
use serde_json::{json, Value};

#[test]
fn a_page_from_samples_is_one_sound_file_with_tables_and_figures() {
    let page = sound(&page_of(&samples()));
    assert!(text_of(&page, "header").contains("quick run of 2026-11-23"));
    for (section, tables, figures, words) in [
        ("qatzip", 4, 2, "2,940,235"),
        ("compress", 5, 3, "37.37"),
        ("qzram", 6, 8, "2.25"),
        ("threads", 3, 1, "did not complete"),
        ("advise", 1, 1, "yes, as predicted"),
        ("scaling", 2, 1, "COMPUTED"),
    ] {
        let count = |what: &str| select(&page, &format!("#{section} {what}")).len();
        assert!(count("table") >= tables, "{section} has {} tables", count("table"));
        assert!(count("svg") >= figures, "{section} has {} figures", count("svg"));
        assert!(text_of(&page, &format!("#{section}")).contains(words), "{section}: no {words}");
    }
    // The document's figures stand beside ours, and a range beside a median.
    assert!(text_of(&page, "#qatzip tr.platen").contains(" to "));
    assert!(text_of(&page, "#compress .findings").contains("Contradicted here"));
    let unended = text_of(&page, "#compress tr.other");
    assert!(unended.contains("did not end in 60 s"), "{unended}");
}

#[test]
fn a_busy_machine_is_warned_of_where_its_figures_are() {
    let page = sound(&page_of(&samples()));
    let warned: Vec<_> =
        select(&page, ".busy").iter().map(|warning| warning.text().collect::<String>()).collect();
    assert_eq!(warned.len(), 1, "{warned:?}");
    let warning = text_of(&page, "#threads .busy");
    assert!(warning.contains("45 % of the machine, 68 % at most"), "{warning}");
    assert!(text_of(&page, "#overview").contains("BUSY: 45 %"));

    let folder = copy();
    set(folder.path(), |record| {
        for step in record["steps"].as_array_mut().unwrap() {
            step["others"] = json!([0.01, 0.0, 0.02]);
        }
    });
    assert!(select(&sound(&page_of(folder.path())), ".busy").is_empty());
}

#[test]
fn simulated_parts_are_hatched_and_labelled() {
    let text = page_of(&samples());
    let page = sound(&text);
    // The style sheet fills this colour's name with the hatch, and the hatch is there.
    assert!(text.contains(r##"[fill="#A0B004"] { fill: url(#hatch-simulated)"##));
    assert_eq!(select(&page, "pattern#hatch-simulated").len(), 1);
    let hatched = select(&page, r##"#qatzip svg rect[fill="#A0B004"]"##);
    assert_eq!(hatched.len(), 1, "the sender's CPU on a simulated device");
    assert!(text_of(&page, "#qatzip svg").contains("SIMULATED QAT"));
    for row in select(&page, "tr.simulated") {
        assert_eq!(row.select(&Selector::parse(".swatch.simulated").unwrap()).count(), 1);
    }
    assert!(select(&page, "#qzram tr.simulated").len() > 10);
    assert!(select(&page, "#qzram .legend .dashed").len() > 4);
    assert!(!select(&page, r##"#scaling svg rect[fill="#A0B005"]"##).is_empty());
}

#[test]
fn a_step_that_did_not_run_says_why() {
    let page = sound(&page_of(&samples()));
    let why = text_of(&page, "#swap .missing");
    assert!(
        why.contains("swap-ins in a guest was left out: linux612/.complete is not there"),
        "{why}"
    );
    assert!(text_of(&page, "#overview table").contains("left out: linux612"));
}

#[test]
fn without_any_samples_each_section_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let page = sound(&page_of(folder.path()));
    for (section, file) in [
        ("qatzip", "channels"),
        ("compress", "compress-idle"),
        ("qzram", "pages"),
        ("threads", "pool"),
        ("swap", "swap"),
        ("advise", "advise"),
        ("scaling", "hop"),
    ] {
        let why = text_of(&page, &format!("#{section} .missing"));
        assert!(why.contains(&format!("{file}.json is not there")), "{section}: {why}");
    }
    assert!(text_of(&page, "#overview .missing").contains("run.json is not there"));
}

#[test]
fn garbage_and_huge_files_are_named_and_the_rest_is_shown() {
    let folder = copy();
    let put = |name: &str, text: &[u8]| fs::write(folder.path().join(name), text).unwrap();
    put("pool.json", b"\x00\xff{{{");
    put("hop.json", "[".repeat(100_000).as_bytes());
    put("codec.json", b"[1, \"<script>\", null]");
    fs::File::create(folder.path().join("pages.json")).unwrap().set_len(40 << 20).unwrap();
    put("run.json", b"{\"steps\": 5}");
    let page = sound(&page_of(folder.path()));
    for (section, words) in [
        ("threads", "pool.json is no JSON"),
        ("scaling", "hop.json is no JSON"),
        ("qzram", "pages.json is larger than the 16 MiB"),
        ("overview", "run.json: "),
    ] {
        let why = text_of(&page, &format!("#{section} .missing"));
        assert!(why.contains(words), "{section}: {why}");
    }
    assert!(!select(&page, "#compress svg").is_empty());
}

#[test]
fn texts_from_files_are_escaped() {
    let folder = copy();
    let evil = "</svg></td><script>alert(1)</script>\"'&";
    let point = json!({"method": evil, "link": 1, "pages": evil, "load": {"rate": 1},
        "predicted": {"verdict": evil, "total-time": 1.0}, "measured": {"total-time": 1.0}});
    let points = json!({"points": [point]});
    fs::write(folder.path().join("advise.json"), points.to_string()).unwrap();
    let page = sound(&page_of(folder.path()));
    assert!(text_of(&page, "#advise td, #advise th").contains("<script>alert(1)</script>"));
}

#[test]
fn the_program_makes_a_page_without_measuring() {
    let out = tempfile::tempdir().unwrap();
    let ask = |from: &Path| {
        Command::new(env!("CARGO_BIN_EXE_report"))
            .arg("--from")
            .arg(from)
            .arg("--out")
            .arg(out.path().join("new"))
            .output()
            .unwrap()
    };
    assert!(ask(&samples()).status.success());
    let page = fs::read_to_string(out.path().join("new/index.html")).unwrap();
    sound(&page);
    assert_eq!(page, page_of(&samples()));
    let failed = ask(&out.path().join("nothing"));
    assert!(!failed.status.success());
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(said.contains("cannot read the folder") && said.contains("nothing"), "{said}");
    let left: Vec<_> = fs::read_dir(out.path().join("new")).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// One of the files of a folder, by its number.
fn nth_file(folder: &Path, number: usize) -> PathBuf {
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.swap_remove(number % files.len())
}

/// Replaces one value within `value`, chosen by `at`.
fn bend(value: &mut Value, at: &mut usize, with: &Value) -> bool {
    if *at == 0 {
        *value = with.clone();
        return true;
    }
    *at -= 1;
    match value {
        Value::Array(all) => all.iter_mut().any(|value| bend(value, at, with)),
        Value::Object(all) => all.values_mut().any(|value| bend(value, at, with)),
        _ => false,
    }
}

/// Pages to make and to parse: `make test` takes a part of them.
fn cases() -> u32 {
    if std::env::var_os("PLATEN_QUICK").is_some() {
        12
    } else {
        60
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// A page is made whatever a value of a file is.
    #[test]
    fn bent_samples_make_a_page(file in 0..12_usize, place in 0..400_usize, kind in 0..9_usize) {
        let folder = copy();
        let path = nth_file(folder.path(), file);
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let with = [
            json!(null), json!(-1.0), json!(0), json!(1e308), json!("<b>\u{0}"), json!([]),
            json!({}), json!([[1, 2], [0, 0]]), json!(u64::MAX),
        ][kind].clone();
        bend(&mut value, &mut place.clone(), &with);
        fs::write(&path, value.to_string()).unwrap();
        sound(&page_of(folder.path()));
    }

    /// And wherever a file is cut.
    #[test]
    fn cut_samples_make_a_page(file in 0..12_usize, cut in 0..1000_usize) {
        let folder = copy();
        let path = nth_file(folder.path(), file);
        let bytes = fs::read(&path).unwrap();
        let end = bytes.len() * cut / 1000;
        fs::write(&path, &bytes[..end]).unwrap();
        sound(&page_of(folder.path()));
    }
}
