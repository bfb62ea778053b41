//! Compares the reports of commands with the reference.

use serde_json::Value;

const REFERENCE: &str = include_str!("../../../../docs/reference.md");

/// Key and type of each row of the section whose title begins so.
fn rows(title: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let begin = format!("\n## {title} (");
    let (_, section) = REFERENCE.split_once(&begin).expect(title);
    let section = section.split("\n## ").next().unwrap();
    section.lines().filter_map(|line| {
        let (key, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
        Some((key, rest.split(" | ").next()?))
    })
}

/// Asserts that the reference has each key of a report, and its type.
#[track_caller]
pub(super) fn is_documented(title: &str, report: &Value) {
    check(title, "", report);
}

#[track_caller]
fn check(title: &str, before: &str, report: &Value) {
    for (key, value) in report.as_object().into_iter().flatten() {
        let name = format!("{before}{key}");
        // A clone's report has the keys of a report.
        let mut rows = rows(title);
        let row = rows.find(|(row, _)| *row == name || before == "clones[]." && row == key);
        let (_, kind) = row.unwrap_or_else(|| panic!("{title}: no '{name}' in docs/reference.md"));
        let fits = match value {
            Value::Null => kind.contains("null"),
            Value::Bool(_) => kind.contains("boolean"),
            Value::Number(number) if number.is_f64() => kind.contains("number"),
            Value::Number(_) => kind.contains("integer"),
            Value::String(_) => kind.contains("string"),
            Value::Array(_) => kind.contains("array"),
            Value::Object(_) => kind.contains("object"),
        };
        assert!(fits, "{title}: '{name}' is {value}, and docs/reference.md says: {kind}");
        for element in value.as_array().into_iter().flatten() {
            if key != "accelerators" {
                check(title, &format!("{name}[]."), element);
            }
        }
    }
}
