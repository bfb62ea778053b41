//! Circles of modules: files of one crate that import each other, directly or indirectly.
//!
//! The search reads source text: `use` trees and paths that begin with `crate`, `super` or `self`,
//! or with the name of a module below. Tests do not count, nor does the crate's root, which
//! re-exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::cargo;

/// A module's path within its crate; the root is empty.
type Module = Vec<String>;
/// The imports of each module.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// The folders of the product's crates, with their benchmarks.
const ROOMS: [&str; 7] = ["engine", "accel", "migrate", "memory", "images", "apps", "bench"];

/// Prints every circle in the crates of `folders`, or in all of the product's; returns whether
/// there is none.
///
/// # Errors
/// If sources cannot be read.
pub(crate) fn print(folders: &[String]) -> Result<bool> {
    let folders = if folders.is_empty() { product()? } else { folders.to_vec() };
    let mut found = 0;
    for folder in &folders {
        for circle in circles(&graph(&sources(&Path::new(folder).join("src"))?)) {
            found += 1;
            let names: Vec<String> = circle.iter().map(|module| module.join("/")).collect();
            println!("{folder}: {} import each other", names.join(", "));
        }
    }
    println!("{} crates, {found} circles of modules", folders.len());
    Ok(found == 0)
}

/// The crates of the product.
fn product() -> Result<Vec<String>> {
    let members = cargo::members()?;
    let is_product = |folder: &String| ROOMS.iter().any(|room| folder.starts_with(room));
    Ok(members.into_iter().filter(is_product).collect())
}

/// Text of each module below `folder`, without comments and tests.
fn sources(folder: &Path) -> Result<BTreeMap<Module, String>> {
    fn add(folder: &Path, at: &Module, all: &mut BTreeMap<Module, String>) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if name == "tests" || name.ends_with("_tests") {
                continue;
            }
            let mut module = at.clone();
            if path.is_dir() {
                module.push(name);
                add(&path, &module, all)?;
            } else if path.extension().is_some_and(|end| end == "rs") {
                if !["lib", "main", "mod"].contains(&name.as_str()) {
                    module.push(name);
                }
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                all.insert(module, code(&text));
            }
        }
        Ok(())
    }
    let mut all = BTreeMap::new();
    add(folder, &Module::new(), &mut all)?;
    Ok(all)
}

/// `text` without comments and tests.
fn code(text: &str) -> String {
    let is_tests =
        |at: &usize| text[*at..].lines().nth(1).is_some_and(|line| line.contains("mod tests {"));
    let attributes = ["#[cfg(test)]", "#[cfg(all(test, not(loom)))]"];
    let ats = attributes.iter().flat_map(|attribute| text.match_indices(attribute));
    let tests = ats.map(|(at, _)| at).filter(is_tests).min();
    let end = tests.unwrap_or(text.len());
    let lines = text[..end].lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

fn graph(sources: &BTreeMap<Module, String>) -> Graph {
    let mut graph = Graph::new();
    for (module, text) in sources.iter().filter(|(module, _)| !module.is_empty()) {
        let mut imports = BTreeSet::new();
        for path in paths(text) {
            let Some(mut target) = absolute(module, &path, sources) else { continue };
            // For a path to an item, the item's module.
            while !target.is_empty() && !sources.contains_key(&target) {
                target.pop();
            }
            if !target.is_empty() && target != *module {
                imports.insert(target);
            }
        }
        graph.insert(module.clone(), imports);
    }
    graph
}

/// The path from the crate's root that `path` means in `module`, if it is in this crate.
fn absolute(
    module: &Module,
    path: &[String],
    sources: &BTreeMap<Module, String>,
) -> Option<Module> {
    let (first, rest) = path.split_first()?;
    let below = |base: &[String], rest: &[String]| [base, rest].concat();
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some(below(module, rest)),
        "super" => {
            let ups = path.iter().take_while(|word| *word == "super").count();
            Some(below(&module[..module.len().checked_sub(ups)?], &path[ups..]))
        }
        _ => {
            let child = below(module, std::slice::from_ref(first));
            sources.contains_key(&child).then(|| below(module, path))
        }
    }
}

/// All paths of `use` statements, and all others that begin with `crate`, `super` or `self`.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut rest = text;
    let mut body = String::new();
    while let Some(at) = find_use(rest) {
        body.push_str(&rest[..at]);
        let tree = &rest[at + 4..];
        let end = tree.find(';').unwrap_or(tree.len());
        expand(tree[..end].trim(), &[], &mut paths);
        rest = &tree[end..];
    }
    body.push_str(rest);
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in body.match_indices(start) {
            let is_start =
                !body[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            let end = body[at..]
                .find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':')
                .map_or(body.len(), |len| at + len);
            if is_start {
                paths.push(words(&body[at..end]));
            }
        }
    }
    paths
}

/// The position of the next `use` statement.
fn find_use(text: &str) -> Option<usize> {
    text.match_indices("use ").map(|(at, _)| at).find(|at| {
        let before = text[..*at].trim_end_matches(' ');
        before.is_empty() || before.ends_with(['\n', ')']) || before.ends_with("pub")
    })
}

/// All paths of a `use` tree.
fn expand(tree: &str, before: &[String], paths: &mut Vec<Vec<String>>) {
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        paths.push([before, &words(path)].concat());
        return;
    };
    let before = [before, &words(&tree[..open])].concat();
    let close = tree.rfind('}').filter(|close| *close > open).unwrap_or(tree.len());
    let inner = &tree[open + 1..close];
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inner[start..at].trim();
                if !part.is_empty() {
                    expand(part, &before, paths);
                }
                start = (at + 1).min(inner.len());
            }
            _ => {}
        }
    }
}

fn words(path: &str) -> Vec<String> {
    path.split("::").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The strongly connected components of two or more modules.
fn circles(graph: &Graph) -> Vec<Vec<Module>> {
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        graph.keys().map(|module| (module, reached(graph, module))).collect();
    let mut circles = Vec::new();
    let mut seen = BTreeSet::new();
    for (module, reached) in &reach {
        let back = |other: &&&Module| reach.get(**other).is_some_and(|set| set.contains(*module));
        let circle: Vec<Module> = reached.iter().filter(back).map(|m| (*m).clone()).collect();
        if circle.len() > 1 && seen.insert(circle.clone()) {
            circles.push(circle);
        }
    }
    circles
}

fn reached<'a>(graph: &'a Graph, from: &Module) -> BTreeSet<&'a Module> {
    let mut all = BTreeSet::new();
    let mut next: Vec<&Module> = graph.get(from).into_iter().flatten().collect();
    while let Some(module) = next.pop() {
        if all.insert(module) {
            next.extend(graph.get(module).into_iter().flatten());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files
            .iter()
            .map(|(path, text)| (path.split('/').map(str::to_owned).collect(), code(text)))
            .collect();
        let circles = circles(&graph(&sources));
        circles
            .iter()
            .map(|circle| circle.iter().map(|m| m.join("/")).collect::<Vec<_>>().join(" "))
            .collect()
    }

    #[test]
    fn circles_are_found_whatever_the_paths_look_like() {
        let two = [("a", "use crate::{x, b::{C, D as E}};"), ("b", "fn f() { super::a::g() }")];
        assert_eq!(found(&two), ["a b"]);
        let three = [("a", "pub use crate::b::f;"), ("b", "use super::c;"), ("c", "use crate::a;")];
        assert_eq!(found(&three), ["a b c"]);
        assert_eq!(found(&[("a", "mod b;\nuse b::C;"), ("a/b", "use super::D;")]), ["a a/b"]);
    }

    #[test]
    fn imports_in_one_direction_are_no_circle() {
        let text = "use crate::b;\n// crate::c\n#[cfg(test)]\nmod tests { use crate::c; }";
        assert_eq!(found(&[("a", text), ("b", "use std::c;"), ("c", "use crate::a;")]), [""; 0]);
    }
}
