//! The options of every command, from clap's definitions.

use clap::{Arg, Command};
use std::fmt::Write;

/// Appends a section for each command that is not hidden and has no commands below it.
pub(super) fn describe(text: &mut String, root: &Command) {
    let mut root = root.clone();
    root.build();
    section(text, &root, root.get_name());
}

fn section(text: &mut String, command: &Command, path: &str) {
    let mut below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set() && below.get_name() != "help")
        .peekable();
    let is_group = below.peek().is_some();
    // The command also does something without a subcommand.
    if is_group && !command.is_subcommand_required_set() {
        own(text, command, path);
    }
    if is_group {
        below.for_each(|below| section(text, below, &format!("{path} {}", below.get_name())));
        return;
    }
    own(text, command, path);
}

/// The section of a command itself.
fn own(text: &mut String, command: &Command, path: &str) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    assert!(!about.is_empty(), "{path} has no comment");
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    writeln!(text, "\n## `{path}`\n\n{about}.\n\n```\n{usage}\n```\n").unwrap();
    text.push_str("| Option | Default | Meaning |\n|---|---|---|\n");
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    let (positional, options): (Vec<_>, Vec<_>) =
        command.get_arguments().filter(shown).partition(|arg| arg.is_positional());
    for arg in positional.into_iter().chain(options) {
        option(text, arg, path);
    }
}

fn option(text: &mut String, arg: &Arg, path: &str) {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    assert!(!help.contains("{n}"), "{path}: clap prints a line break for {{n}}");
    assert!(!help.is_empty(), "{arg} of {path} has no comment");
    let mut names = vec![format!("`{arg}`")];
    for alias in arg.get_visible_aliases().unwrap_or_default() {
        names.push(format!("`--{alias}`"));
    }
    let given: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let (mut help, told) =
        match help.strip_suffix(']').and_then(|help| help.split_once(" [default: ")) {
            Some((help, default)) => (help.to_owned(), default.to_owned()),
            None => (help, String::new()),
        };
    let default = match (arg.is_required_set(), given.as_slice(), told) {
        (true, ..) => "required".to_owned(),
        (_, _, told) if !told.is_empty() => told,
        // clap gives a flag the default value "false".
        (_, [], _) => "none".to_owned(),
        _ if !arg.get_action().takes_values() => "off".to_owned(),
        (_, given, _) => format!("`{}`", given.join(",")),
    };
    help.push('.');
    if arg.get_action().takes_values() {
        for value in arg.get_possible_values() {
            let Some(meaning) = value.get_help().map(ToString::to_string) else { continue };
            let meaning = meaning.trim_end_matches('.');
            write!(help, "<br>`{}`: {meaning}.", value.get_name()).unwrap();
        }
    }
    let row = format!("| {} | {default} | {help} |", names.join(", "));
    writeln!(text, "{}", row.replace('\n', " ")).unwrap();
}
