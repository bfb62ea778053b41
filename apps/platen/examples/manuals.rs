//! Writes manual pages and shell completions of both programs, from the definitions of their
//! command lines: `cargo run -p platen --example manuals -- FOLDER`, for packages.

use clap::Command;
use clap_complete::Shell;
use std::io::Write;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(std::io::Error::other("usage: manuals FOLDER"));
    };
    for name in ["man", "bash", "zsh", "fish"] {
        std::fs::create_dir_all(folder.join(name))?;
    }
    for mut program in platen::commands() {
        let name = program.get_name().to_owned();
        for (shell, under) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
            clap_complete::generate_to(shell, &mut program, &name, folder.join(under))?;
        }
        program.build();
        pages(&program, &name, &folder.join("man"))?;
    }
    Ok(())
}

/// The page of a command, and those of the commands below it that are not hidden.
fn pages(command: &Command, name: &str, folder: &Path) -> std::io::Result<()> {
    let shown = |below: &&Command| !below.is_hide_set() && below.get_name() != "help";
    for below in command.get_subcommands().filter(shown) {
        pages(below, &format!("{name}-{}", below.get_name()), folder)?;
    }
    // clap wants names that live as long as the program, which ends in a moment.
    let called: &'static str = name.to_owned().leak();
    let called = command.clone().name(called).display_name(called);
    let mut page = Vec::new();
    clap_mangen::Man::new(called).title(name.to_uppercase()).render(&mut page)?;
    std::fs::File::create(folder.join(format!("{name}.1")))?.write_all(&page)
}
