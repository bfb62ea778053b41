//! Boots a guest that swaps and runs commands in it: `swap_guest MEMORY_MIB CPUS PROGRAM... --
//! COMMAND...`.
//!
//! For examining by hand what a test does.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vm_tests::{cleanup, end, scratch, swap};

/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    end("swap_guest", run_all())
}

fn run_all() -> Result<()> {
    cleanup::install()?;
    if let Some(why) = swap::missing() {
        anyhow::bail!(why);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [memory, cpus, rest @ ..] = words.as_slice() else { anyhow::bail!("MEMORY_MIB CPUS ...") };
    let at = rest.iter().position(|word| word == "--").context("no -- before the commands")?;
    let mut contents = swap::Contents::default();
    for program in &rest[..at] {
        if program == "redis" {
            contents.redis()?;
            continue;
        }
        let path = PathBuf::from(program);
        let name =
            path.file_name().context("a program without a name")?.to_string_lossy().into_owned();
        contents.program(&path, &name)?;
    }
    let (folder, _ticket) = scratch::folder()?;
    let initramfs = folder.join("initramfs");
    swap::write_initramfs(&initramfs, &contents)?;
    let begin = Instant::now();
    let booted = swap::SwapVm::boot("hand", &initramfs, memory.parse()?, cpus.parse()?, 0);
    std::fs::remove_dir_all(&folder)?;
    let mut vm = booted?;
    println!("booted in {:.1} s", begin.elapsed().as_secs_f64());
    for command in &rest[at + 1..] {
        let begin = Instant::now();
        let (status, output) = vm.try_sh(command, LIMIT)?;
        println!("$ {command}\n{output}\n[{status}, {:.1} s]", begin.elapsed().as_secs_f64());
    }
    Ok(())
}
