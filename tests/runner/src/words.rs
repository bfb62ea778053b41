//! Words of comments and documents, as far as a program can judge them.
//!
//! A sentence that begins with "Who" or "What" is a question. Otherwise it hides its subject: a
//! reader has to hold the clause in mind until the verb comes. Lines of comments have at most 100
//! columns, except for tables and drawings.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cargo;

/// Longest line of a comment.
const COLUMNS: usize = 100;

/// Prints every fault in comments of the workspace's crates and in documents; returns whether there
/// is none.
///
/// # Errors
/// If a file cannot be read.
pub(crate) fn print() -> Result<bool> {
    let mut files = Vec::new();
    for folder in cargo::members()? {
        find(Path::new(&folder), "rs", &mut files)?;
    }
    let folders = [".", "docs", "fuzz", "packaging"];
    for folder in folders.iter().map(Path::new).filter(|folder| folder.is_dir()) {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "md") {
                files.push(path);
            }
        }
    }
    let mut faults = 0;
    for path in &files {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let is_code = path.extension().is_some_and(|end| end == "rs");
        for (line, fault) in if is_code { in_comments(&text) } else { in_document(&text) } {
            faults += 1;
            println!("{}:{line}: {fault}", path.display());
        }
    }
    println!("{} files, {faults} faults of words", files.len());
    Ok(faults == 0)
}

/// All files below `folder` with this ending.
fn find(folder: &Path, ending: &str, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                find(&path, ending, files)?;
            }
        } else if path.extension().is_some_and(|end| end == ending) {
            files.push(path);
        }
    }
    Ok(())
}

/// A line, from 1, and what is wrong with it.
type Fault = (usize, String);

fn in_comments(text: &str) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut comment = Vec::new();
    let mut is_prose = true;
    for (number, line) in text.lines().enumerate().map(|(index, line)| (index + 1, line)) {
        let Some(said) = line.trim_start().strip_prefix("//") else {
            faults.extend(sentences(&std::mem::take(&mut comment)));
            is_prose = true;
            continue;
        };
        let said = said.trim_start_matches(['/', '!']).trim();
        if said.starts_with("```") {
            is_prose = !is_prose;
        }
        let is_prose = is_prose && !said.starts_with('|');
        if is_prose && line.chars().count() > COLUMNS {
            faults.push((number, format!("the comment is longer than {COLUMNS} columns")));
        }
        comment.push((number, if is_prose { said } else { "" }));
    }
    faults.extend(sentences(&comment));
    faults
}

fn in_document(text: &str) -> Vec<Fault> {
    let mut is_prose = true;
    let mut prose = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_prose = !is_prose;
        }
        // A blank line ends a paragraph.
        let is_row = line.starts_with('|') || line.starts_with('#');
        prose.push((index + 1, if is_prose && !is_row { line.trim() } else { "" }));
    }
    sentences(&prose)
}

/// The sentences of these lines that begin with "Who" or "What" and do not ask.
fn sentences(lines: &[(usize, &str)]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (index, &(number, line)) in lines.iter().enumerate() {
        // An empty line or a full stop ends the sentence before.
        let before = index.checked_sub(1).map_or("", |index| lines[index].1);
        let mut is_start = before.is_empty() || before.ends_with(['.', '!', '?', ':']);
        for (at, word) in words(line) {
            if is_start
                && ["Who", "What"].contains(&word)
                && !asks(&line[at..], &lines[index + 1..])
            {
                let begin: String = line[at..].chars().take(40).collect();
                faults.push((number, format!("a sentence that does not ask begins \"{begin}\"")));
            }
            is_start = word.ends_with(['.', '!', '?']) || ["-", "*"].contains(&word);
        }
    }
    faults
}

/// Each word of a line, with its place.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> {
    line.split(' ').scan(0, |at, word| {
        let here = *at;
        *at += word.len() + 1;
        Some((here, word))
    })
}

/// Whether the sentence that begins this text ends with a question mark.
fn asks(begin: &str, rest: &[(usize, &str)]) -> bool {
    let rest = rest.iter().map(|(_, line)| *line).take_while(|line| !line.is_empty());
    let end = std::iter::once(begin)
        .chain(rest)
        .flat_map(|line| line.split(' '))
        .find_map(|word| word.chars().last().filter(|last| ['.', '?', '!'].contains(last)));
    end == Some('?')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(faults: &[Fault]) -> Vec<usize> {
        faults.iter().map(|fault| fault.0).collect()
    }

    #[test]
    fn sentences_that_hide_their_subject_are_found() {
        let text = "//! @What a thing is.\n\
                    fn f() {}\n\
                    /// A thing. @Who asks for it waits.\n\
                    // It goes on.\n\
                    /// @What is it,\n\
                    /// and why?\n\
                    let x = 1; // @What\n\
                    /// It does not know\n\
                    /// @What Is Meant.\n";
        assert_eq!(lines(&in_comments(&text.replace('@', ""))), [1, 3]);
        let drawn = format!("/// ```text\n/// {}\n/// ```\n", "x".repeat(COLUMNS));
        assert_eq!(lines(&in_comments(&drawn)), [0; 0]);
        let long = format!("/// {}\n", "x".repeat(COLUMNS));
        assert_eq!(lines(&in_comments(&long)), [1]);
    }

    #[test]
    fn code_tables_and_headings_of_documents_are_not_sentences() {
        let text =
            "# @What it is\n\n| @What | x |\n\n```sh\nWhat\n```\n\nWhat is sent is gone.\n\n\
                    - @Who runs?\n- @What is kept stays.\n";
        assert_eq!(lines(&in_document(&text.replace('@', ""))), [9, 12]);
    }
}
