//! `platen device stat`: queries the devices that are served.

use super::args::StatArgs;
use super::control;
use super::footprint::Footprint;
use super::requests;
use super::status::Status;
use crate::say::{say, show};
use crate::size::Size;
use anyhow::{ensure, Context};
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

pub(crate) fn run(args: &StatArgs) -> anyhow::Result<()> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let (all, silent) = match &args.name {
        Some(name) => {
            let status = ask(control::address(&folder, name).path());
            let status = status.map_err(|error| with_reason(error, &folder, name));
            (vec![status.with_context(|| format!("device {name}"))?], 0)
        }
        None => everything(&folder)?,
    };
    if args.json {
        show(&format!("{}\n", serde_json::to_string_pretty(&all)?))?;
    } else if args.name.is_some() {
        show(&all.iter().map(counters).collect::<String>())?;
    } else {
        show(&table(&all))?;
    }
    ensure!(silent == 0, "{silent} of {} devices gave no answer", all.len() + silent);
    Ok(())
}

/// The devices that answer, and the number of those that do not.
fn everything(folder: &Path) -> anyhow::Result<(Vec<Status>, usize)> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((Vec::new(), 0)),
        other => other.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "sock") {
            paths.push(path);
        }
    }
    paths.sort();
    let (mut all, mut silent) = (Vec::new(), 0);
    for path in paths {
        match ask(&path) {
            Ok(status) => all.push(status),
            Err(error) => {
                silent += 1;
                let name = path.file_stem().unwrap_or_default().to_string_lossy();
                let error = with_reason(error, folder, &name);
                say(&format!("device {name}: {error:#}"));
            }
        }
    }
    Ok((all, silent))
}

/// How long a supervisor has to answer why there is no server.
const REASON: Duration = Duration::from_secs(1);

/// Adds the supervisor's reason why there is no server.
fn with_reason(error: anyhow::Error, folder: &Path, name: &str) -> anyhow::Error {
    with_reason_in(REASON, error, folder, name)
}

fn with_reason_in(
    patience: Duration,
    error: anyhow::Error,
    folder: &Path,
    name: &str,
) -> anyhow::Error {
    match requests::ask(folder, name, "state", patience) {
        Ok(said) if said.trim_end() != requests::DONE && !said.is_empty() => {
            anyhow::anyhow!("{error:#}; its supervisor says: {}", said.trim_end())
        }
        _ => error,
    }
}

pub(super) fn ask(path: &Path) -> anyhow::Result<Status> {
    let answer = control::ask(path, "stat")?;
    let status: Status =
        serde_json::from_str(&answer).context("the answer is of another version")?;
    // Measured here, not in the server, because it may need memory.
    let footprint = Footprint::of(Path::new("/proc"), status.pid, status.disksize);
    Ok(Status { footprint, ..status })
}

/// One line per device: the columns of zramctl that apply, and the ratio.
pub(crate) fn table(all: &[Status]) -> String {
    let mut rows = vec![[
        "NAME",
        "ALGORITHM",
        "DISKSIZE",
        "DATA",
        "COMPR",
        "TOTAL",
        "RATIO",
        "STREAMS",
        "TRANSPORT",
    ]
    .map(str::to_owned)];
    for status in all {
        let size = |bytes| Size(bytes).to_string();
        let mm = &status.mm_stat;
        let ways: Vec<String> =
            status.transports.iter().map(|way| format!("{}:{}", way.kind, way.address)).collect();
        let algorithm = match status.codec.as_str() {
            "none" => "none".to_owned(),
            codec => format!("{codec}:{}", status.level),
        };
        rows.push([
            status.name.clone(),
            algorithm,
            size(status.disksize),
            size(mm.orig_data_size),
            size(mm.compr_data_size),
            size(mm.mem_used_total),
            if mm.orig_data_size == 0 { "-".to_owned() } else { format!("{:.2}", status.ratio()) },
            (status.workers + 1).to_string(),
            ways.join(" "),
        ]);
    }
    let mut text = String::new();
    for row in &rows {
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
            // Names aligned left, numbers right, as in zramctl.
            let written = match column {
                8 => write!(text, "{cell}"),
                0 | 1 => write!(text, "{cell:<width$} "),
                _ => write!(text, "{cell:>width$} "),
            };
            written.expect("a string takes all");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Every counter of one device, under zram's headings.
pub(crate) fn counters(status: &Status) -> String {
    let mut text = table(std::slice::from_ref(status));
    let mut group = |name: &str, fields: &[(&str, u64, &str, bool)]| {
        if !name.is_empty() {
            writeln!(text, "{name}").expect("a string takes all");
        }
        for (name, value, help, _) in fields {
            writeln!(text, "  {name:<16} {value:>16}  {help}").expect("a string takes all");
        }
    };
    group("mm_stat", &status.mm_stat.fields());
    group("io_stat", &status.io_stat.fields());
    group("bd_stat", &status.bd_stat.fields());
    group("platen", &status.platen.fields());
    match &status.dictionaries {
        Some(dictionaries) => group("dictionaries", &dictionaries.fields()),
        None if status.codec == "zstd" => {
            group("dictionaries: none (dictionary = \"off\", or no supervisor)", &[]);
        }
        None => {}
    }
    if let Some(why) = &status.untrained {
        group(&format!("dictionaries: none are trained: {why}"), &[]);
    }
    if let Some(backing) = &status.backing {
        group(&format!("backing {}", backing.name), &backing.fields());
    }
    if let Some(accelerated) = &status.accelerator {
        group("accelerator", &accelerated.fields());
        for (reason, count) in &accelerated.reasons {
            let name = format!("redone/{reason}");
            group("", &[(&name, *count, "Of those redone", true)]);
        }
    }
    if let Some(why) = &status.unaccelerated {
        group(&format!("accelerator: none, codec qatzip in software: {why}"), &[]);
    }
    if let Some(footprint) = &status.footprint {
        group("footprint", &footprint.fields());
    }
    if let Some(policy) = &status.policy {
        group("policy", &policy.fields());
    }
    match status.pressure.as_deref() {
        Some("none") => writeln!(
            text,
            "memory pressure: not known (no file of it can be read): with writeback_pressed_only nothing is written back"
        ),
        Some(known) => writeln!(text, "memory pressure: known by {known}"),
        None => Ok(()),
    }
    .expect("a string takes all");
    if let Some(backing) = &status.backing {
        if let Some(stopped) = &backing.stopped {
            writeln!(text, "nothing more is written back: {stopped}").expect("a string takes all");
        }
        if let Some(refused) = &backing.refused {
            // A named backing device exists, but has changed.
            let what = match backing.name.as_str() {
                "" => "no backing device",
                _ => "its backing device is read as far as it still has what was written",
            };
            writeln!(text, "{what}: {refused}").expect("a string takes all");
        }
    }
    for path in &status.removed {
        writeln!(text, "{path} was removed or replaced: no client finds the device by it")
            .expect("a string takes all");
    }
    if let Some(damage) = &status.platen.damage {
        writeln!(text, "first damage: {damage}").expect("a string takes all");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::status;
    use super::super::status::Transport;
    use super::*;

    #[test]
    fn a_device_without_a_server_is_shown_with_what_its_supervisor_says() {
        use std::io::{BufRead, BufReader, Write};
        let folder = tempfile::tempdir().unwrap();
        let listening = requests::address(folder.path(), "one").listen().unwrap();
        let answers = std::thread::spawn(move || {
            for answer in ["the server has died (signal: 9): starting another in 10s", "done"] {
                let (stream, _) = listening.listener.accept().unwrap();
                let mut asked = String::new();
                BufReader::new(&stream).read_line(&mut asked).unwrap();
                assert_eq!(asked, "state\n");
                writeln!(&stream, "{answer}").unwrap();
            }
        });
        let shown = |name| {
            let error = anyhow::anyhow!("it does not answer within 5 s");
            // The thread above may get no CPU for as long as a user is patient.
            format!("{:#}", with_reason_in(REASON * 300, error, folder.path(), name))
        };
        let reason = shown("one");
        assert!(reason.starts_with("it does not answer within 5 s; its supervisor says: "));
        assert!(reason.ends_with("starting another in 10s"), "{reason}");
        // The supervisor has no message, or there is no supervisor.
        assert_eq!(shown("one"), "it does not answer within 5 s");
        answers.join().unwrap();
        assert_eq!(shown("one"), "it does not answer within 5 s");
    }

    #[test]
    fn the_table_lines_up_and_json_comes_back() {
        let mut status = status();
        status.transports.push(Transport {
            kind: "nbd".into(),
            address: "unix:/run/x".into(),
            connections: 1,
        });
        let text = table(std::slice::from_ref(&status));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[1].starts_with("swap0 zstd:1"), "{text}");
        assert!(lines[1].ends_with("nbd:unix:/run/x"), "{text}");
        assert_eq!(lines[0].find("TRANSPORT"), lines[1].find("nbd:"), "{text}");
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&json).unwrap(), status);
        let text = counters(&status);
        for field in ["orig_data_size", "huge_pages_since", "notify_free", "bd_writes"] {
            assert!(text.contains(field), "{text}");
        }
        status.removed = vec!["/run/x".to_owned()];
        assert!(counters(&status).contains("/run/x was removed or replaced: no client finds"));
        status.pressure = Some("none".to_owned());
        assert!(counters(&status).contains("memory pressure: not known"));
        status.pressure = Some("trigger".to_owned());
        assert!(counters(&status).contains("memory pressure: known by trigger"));
    }
}
