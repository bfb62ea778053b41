//! The machine, the sources and the pages of a run.

use std::fs;
use std::path::Path;
use std::process::Command;

use corpus::Corpus;
use twox_hash::XxHash3_128;

use crate::record::{CorpusRecord, Machine, SetRecord};

/// This machine.
pub fn machine() -> Machine {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let after = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim());
        value.unwrap_or_default().to_owned()
    };
    let memory = after(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal");
    let kib: u64 = memory.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
    Machine {
        cpu: after(&info, "model name"),
        cores: std::thread::available_parallelism().map_or(0, |cores| cores.get() as u64),
        memory_mib: kib >> 10,
        kernel: said(Command::new("uname").arg("-r")),
        qemu: said(Command::new("qemu-system-x86_64").arg("--version")),
        is_virtual: after(&info, "flags").split(' ').any(|flag| flag == "hypervisor"),
    }
}

/// `git describe` of the sources in `folder`.
pub fn commit(folder: &Path) -> String {
    let arguments = ["describe", "--always", "--dirty", "--abbrev=12"];
    let said = said(Command::new("git").args(arguments).current_dir(folder));
    if said.is_empty() {
        "not a git checkout".to_owned()
    } else {
        said
    }
}

/// The pages, with their hashes; and the set for what the QZRAM paper measured with Calgary's
/// files: these if they are there, prose if not.
pub fn pages() -> (CorpusRecord, String) {
    let corpus = Corpus::load();
    let names = corpus.names();
    let sets = names.iter().filter_map(|name| {
        let set = corpus.set(name)?;
        let (name, bytes) = ((*name).to_owned(), set.pages().len() as u64);
        Some(SetRecord { name, bytes, xxh3: format!("{:032x}", XxHash3_128::oneshot(set.pages())) })
    });
    let record = CorpusRecord { origin: corpus.origin().to_string(), sets: sets.collect() };
    let calgary: Vec<&str> =
        names.iter().copied().filter(|name| name.starts_with("calgary/")).collect();
    let set = if calgary.is_empty() { "text".to_owned() } else { calgary.join("+") };
    (record, set)
}

/// The first line of a command's output; empty if it cannot be run.
fn said(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
}
