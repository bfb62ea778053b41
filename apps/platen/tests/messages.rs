//! Every line that a device prints, and every reason why its supervisor refuses a request, is in
//! docs/failures.md: a person searches there for the words of a message.

use std::fs;
use std::path::{Path, PathBuf};

/// Sources, from the root of the repository, and what their messages begin with.
const SOURCES: [(&str, &[&str]); 6] = [
    ("apps/platen/src/device", &["say("]),
    ("apps/platen/src/device/requests.rs", &["anyhow!(", "bail!(", "context("]),
    ("apps/platen/src/device/renewal.rs", &["Err(", "other(", "ensure!("]),
    ("apps/platen/src/device/writeback.rs", &["Err(", "bail!("]),
    ("memory/swap/src/supervisor", &["say(", "Err(", "#[error(", "cannot_end("]),
    ("memory/swap/src/supervisor/run/renew.rs", &["refuse_renewal("]),
];

/// A part of a message with fewer words says too little to be searched for.
const WORDS: usize = 3;

#[test]
fn every_message_of_a_device_has_its_section() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sections = plain(&fs::read_to_string(root.join("docs/failures.md")).unwrap());
    let (mut seen, mut missing) = (0, Vec::new());
    for (source, openings) in SOURCES {
        for file in files(&root.join(source)) {
            let text = fs::read_to_string(&file).unwrap();
            let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            for message in openings.iter().flat_map(|opening| messages(product, opening)) {
                let parts = parts(&message);
                seen += usize::from(!parts.is_empty());
                if !parts.is_empty() && !parts.iter().any(|part| sections.contains(part)) {
                    missing.push(format!("{}: {message}", file.display()));
                }
            }
        }
    }
    assert!(seen > 50, "only {seen} messages were found: have their macros other names now?");
    assert!(missing.is_empty(), "docs/failures.md lacks\n{}", missing.join("\n"));
}

/// Markup and the difference between a space and a line's end taken away.
fn plain(text: &str) -> String {
    let text = text.replace(['`', '>'], "").to_lowercase();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let product = entries.filter(|path| !path.ends_with("tests.rs") && !path.ends_with("tests"));
    let all: Vec<_> = product.flat_map(|path| files(&path)).collect();
    all.into_iter().filter(|path| path.extension().is_some_and(|kind| kind == "rs")).collect()
}

/// The string literals behind `opening`, with or without a `format!` around them.
fn messages(text: &str, opening: &str) -> Vec<String> {
    let behind = text.match_indices(opening).map(|(at, _)| &text[at + opening.len()..]);
    behind
        .filter_map(|rest| {
            let rest = rest.trim_start();
            let rest = rest.strip_prefix('&').unwrap_or(rest);
            let rest = rest.strip_prefix("format!(").unwrap_or(rest).trim_start();
            literal(rest.strip_prefix('"')?)
        })
        .collect()
}

/// The text up to the closing quotation mark; a backslash at a line's end joins two lines.
fn literal(rest: &str) -> Option<String> {
    let (mut found, mut chars) = (String::new(), rest.chars());
    loop {
        match chars.next()? {
            '"' => return Some(found),
            '\\' => match chars.next()? {
                '\n' => chars = chars.as_str().trim_start().chars(),
                other => found.push(other),
            },
            other => found.push(other),
        }
    }
}

/// The clauses of a message that do not vary, where they are long enough.
fn parts(message: &str) -> Vec<String> {
    let fixed = message.split('{').enumerate().map(|(nth, part)| match nth {
        0 => part,
        _ => part.split_once('}').map_or("", |(_, fixed)| fixed),
    });
    let clauses = fixed.flat_map(|part| part.split([':', ';']));
    let trimmed = clauses.map(|part| plain(part).trim_matches([' ', ',', '(', ')']).to_owned());
    trimmed.filter(|part: &String| part.split(' ').count() >= WORDS).collect()
}

#[test]
fn a_message_is_taken_from_a_source_as_it_is_printed() {
    let source =
        "say(&format!(\n    \"{disk} has taken \\\n     none of {all} \\\"x\\\" and that\"\n";
    assert_eq!(messages(source, "say("), ["{disk} has taken none of {all} \"x\" and that"]);
    assert_eq!(parts(&messages(source, "say(")[0]), ["has taken none of", "\"x\" and that"]);
    assert_eq!(parts("{a} short: {b}"), [""; 0]);
}
