//! `--codec auto` against the best fixed codec and level, over shaped links.
//!
//! A generated QEMU stream of real pages goes through `platen relay`, over the link, and out of
//! `platen receive`, where its bytes are compared. For each kind of data and each link every codec
//! and level runs once, and is stopped when it is clearly slower than the best so far. The best
//! three and `auto` then run again, interleaved, and are compared by their medians. Time is from
//! the first byte into one relay to QEMU's answer out of it.
//!
//! The two halves of this machine's CPUs stand for two hosts: `relay` has one; `receive` and this
//! program, which stands for both QEMUs, have the other (`--shared`: all have all CPUs).

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use corpus::{Corpus, Rounds};
use serde_json::{json, Value};
use stream::synth::{main_stream, Style};
use vm_tests::{cleanup, platen, Lab, Rate, Side};

/// The size of QEMU's sendmsg: 64 buffers, headers and pages alternating.
const WRITE_BYTES: usize = 32 * (8 + 4096);
/// QEMU's answer when it has loaded the VM: SHUT, 4 bytes, 0.
const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
/// There are only 255 rounds.
const SMALL: usize = 16 << 20;
/// The time limit of a run.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs auto against every codec and level, and prints by how much it is slower than the best.
#[derive(Debug, Parser)]
struct Options {
    /// Kinds of data: names of the corpus's sets.
    #[arg(long, value_delimiter = ',', default_value = "text,guest,random")]
    data: Vec<String>,
    /// Links in Mbit/s; 0 is unlimited.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000,0")]
    links: Vec<u32>,
    /// Fixed choices to look through, CODEC or CODEC:LEVEL; all there are unless given.
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true)]
    fixed: Vec<String>,
    /// Runs of auto and of each of the best three.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// MiB for a link of 100 Mbit/s to 9 Gbit/s (10 s at 100 Mbit/s: what is learnt in the first
    /// half second must not be all there is); a quarter for slower ones, four times as much for
    /// faster ones.
    #[arg(long, default_value_t = 384, value_parser = clap::value_parser!(u32).range(8..=4096))]
    mib: u32,
    /// Let everything run on all CPUs.
    #[arg(long)]
    shared: bool,
    /// Print what auto decides.
    #[arg(long)]
    explain: bool,
    /// Write every run to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    vm_tests::end("auto_bench", bench(&Options::parse()))
}

/// The available fixed choices, those first that are likely to be good.
fn all() -> Vec<String> {
    let mut fixed: Vec<String> =
        ["none", "lz4", "lz4:-7", "lz4:-15", "lz4:-31"].map(String::from).to_vec();
    fixed.extend((-5..=19).filter(|level| *level != 0).map(|level| format!("zstd:{level}")));
    fixed.extend((1..=9).map(|level| format!("zlib:{level}")));
    fixed.extend((1..=9).map(|level| format!("qatzip:{level}")));
    fixed
}

struct Run {
    seconds: f64,
    cpu: f64,
    wire: u64,
    report: Value,
}

/// The environment of the runs.
struct Setting {
    lab: Lab,
    /// CPUs of the source's host, and of the destination's.
    here: String,
    there: String,
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    platen::binary()?;
    let [here, there] = halves(options.shared)?;
    keep_to(&there)?;
    let setting = Setting { lab: Lab::new()?, here, there };
    let lab = &setting.lab;
    let corpus = Corpus::load();
    let (origin, net) = (corpus.origin(), lab.net.describe());
    println!("{origin}; {net}; source on CPUs {}, destination on {}", setting.here, setting.there);
    println!(
        "{:<8} {:>10} {:>6}  {:<10} {:>8} {:>8} {:>7} {:>7}  what auto sent how",
        "data", "Mbit/s", "MiB", "best", "s", "auto s", "auto is", "least"
    );
    let mut cells = Vec::new();
    for data in &options.data {
        let set = corpus.set(data).with_context(|| format!("the corpus has no set {data}"))?;
        let mut pages = set.into_pages();
        while pages.len() < SMALL {
            // Pages repeat, but farther apart than the length of a unit.
            pages.extend_from_within(..);
        }
        let rounds = Rounds::new(pages);
        for &link in &options.links {
            let mib = match link {
                1..=99 => options.mib / 4,
                100..=9999 => options.mib,
                _ => 4 * options.mib,
            };
            let pages = rounds.bytes((mib as usize) << 20);
            let bytes = main_stream(Style::Qemu72, 4096, pages.chunks_exact(4096));
            drop(pages);
            lab.net.shape(if link == 0 { Rate::Unlimited } else { Rate::Mbit(link) })?;
            let cell = cell(&setting, options, &bytes)?;
            let text = |key: &str| cell[key].as_str().unwrap_or_default().to_string();
            let number = |key: &str| cell[key].as_f64().unwrap_or(f64::NAN);
            println!(
                "{data:<8} {link:>10} {mib:>6}  {:<10} {:>8.3} {:>8.3} {:>6.1}% {:>6.1}%  {}",
                text("best"),
                number("best-seconds"),
                number("auto-seconds"),
                100.0 * (number("auto-seconds") / number("best-seconds") - 1.0),
                100.0 * (number("auto-least") / number("best-least") - 1.0),
                text("auto-codecs")
            );
            cells.push(json!({ "data": data, "mbit": link, "mib": mib, "result": cell }));
        }
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&json!({ "auto": cells }))?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Runs one kind of data over one link.
fn cell(setting: &Setting, options: &Options, bytes: &[u8]) -> Result<Value> {
    let fixed = if options.fixed.is_empty() { all() } else { options.fixed.clone() };
    let mut best: Option<f64> = None;
    let mut swept: Vec<(f64, String)> = Vec::new();
    let mut slower = Vec::new();
    for choice in fixed {
        let limit = best.map_or(LIMIT, |best| Duration::from_secs_f64(1.25 * best + 0.1));
        match one(setting, options, bytes, &choice, limit)? {
            Some(run) => {
                best = Some(best.map_or(run.seconds, |best| best.min(run.seconds)));
                swept.push((run.seconds, choice));
            }
            None => slower.push(choice),
        }
    }
    swept.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut names: Vec<String> = swept.iter().take(3).map(|(_, name)| name.clone()).collect();
    names.push("auto".into());
    let mut runs: Vec<Vec<Run>> = names.iter().map(|_| Vec::new()).collect();
    for round in 0..options.runs as usize {
        for at in 0..names.len() {
            // In rotating order, so that none always follows the slowest.
            let at = (at + round) % names.len();
            let run = one(setting, options, bytes, &names[at], LIMIT)?;
            runs[at].push(run.with_context(|| format!("{} took too long", names[at]))?);
        }
    }
    let medians: Vec<f64> =
        runs.iter().map(|runs| median(runs.iter().map(|r| r.seconds))).collect();
    // On a busy machine the minima are more useful than the medians.
    let least: Vec<f64> =
        runs.iter().map(|runs| runs.iter().map(|r| r.seconds).fold(f64::MAX, f64::min)).collect();
    let auto = names.len() - 1;
    let best = (0..auto).min_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    let best = best.context("no fixed choice got through")?;
    let kept: Vec<Value> = names
        .iter()
        .zip(&runs)
        .map(|(name, runs)| {
            let runs = runs.iter().map(|run| {
                json!({ "seconds": run.seconds, "cpu": run.cpu, "wire": run.wire,
                        "auto": run.report["auto"] })
            });
            json!({ "codec": name, "runs": runs.collect::<Vec<_>>() })
        })
        .collect();
    let last = runs[auto].last().context("auto was not run")?;
    Ok(json!({
        "best": names[best],
        "best-seconds": medians[best],
        "auto-seconds": medians[auto],
        "best-least": least[..auto].iter().copied().fold(f64::MAX, f64::min),
        "auto-least": least[auto],
        "auto-codecs": codecs(&last.report),
        "swept": swept.iter().map(|(seconds, name)| json!([name, seconds])).collect::<Vec<_>>(),
        "given-up": slower,
        "runs": kept,
    }))
}

/// "zstd 3 71 %, none 29 %".
fn codecs(report: &Value) -> String {
    let parts = report["auto"]["codecs"].as_array().cloned().unwrap_or_default();
    let plain = |part: &Value| part["plain"].as_f64().unwrap_or(0.0);
    let all: f64 = parts.iter().map(plain).sum();
    let words = parts.iter().take(4).map(|part| {
        let codec = part["codec"].as_str().unwrap_or_default();
        format!("{codec} {} {:.0} %", part["level"], 100.0 * plain(part) / all)
    });
    words.collect::<Vec<_>>().join(", ")
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One transfer through both relays; `None` if it takes longer than `limit`.
fn one(
    setting: &Setting,
    options: &Options,
    bytes: &[u8],
    choice: &str,
    limit: Duration,
) -> Result<Option<Run>> {
    let Setting { lab, here, there } = setting;
    let (input, output) = (lab.scratch("in"), lab.scratch("out"));
    let listener = UnixListener::bind(&output)?;
    let deliver = format!("unix:{}", output.display());
    let mut receive = platen::receive_with(
        lab,
        Side::Destination,
        &["--deliver", &deliver, "--once", "--cpus", there],
    )?;
    let mut flags = vec!["--cpus", here, "--codec"];
    let (codec, level) = choice.split_once(':').unwrap_or((choice, ""));
    flags.push(codec);
    if !level.is_empty() {
        flags.extend(["--level", level]);
    }
    flags.extend(["--explain"].into_iter().filter(|_| options.explain && choice == "auto"));
    let mut relay = platen::relay(lab, Side::Source, &input, receive.peer, &flags)?;
    let socket = UnixStream::connect(&input)?;
    let started = Instant::now();
    let over = std::thread::scope(|scope| -> Result<bool> {
        let writing = socket.try_clone()?;
        // Both end when the relays do.
        scope.spawn(move || {
            let _ = bytes.chunks(WRITE_BYTES).try_for_each(|chunk| (&writing).write_all(chunk));
        });
        let sink = scope.spawn(|| take(&listener, bytes));
        socket.set_read_timeout(Some(limit))?;
        let mut shut = [0; 8];
        let answered = (&socket).read_exact(&mut shut);
        if let Err(error) = answered {
            let late = error.kind() == std::io::ErrorKind::WouldBlock;
            let said = format!("{}; {}", relay.process.tail(), receive.platen.process.tail());
            relay.process.kill()?;
            receive.platen.process.kill()?;
            let _ = socket.shutdown(Shutdown::Both);
            // The sink may still wait for its connection.
            let _ = UnixStream::connect(&output);
            let _ = sink.join();
            ensure!(late, "{choice}: no answer came back: {said}");
            return Ok(false);
        }
        ensure!(shut == SHUT_OK, "the return path brought {shut:02x?}");
        sink.join().map_err(|_| anyhow::anyhow!("the sink panicked"))??;
        Ok(true)
    })?;
    let seconds = started.elapsed().as_secs_f64();
    drop(socket);
    if !over {
        return Ok(None);
    }
    let ended =
        [relay.succeed(Duration::from_secs(30))?, receive.platen.succeed(Duration::from_secs(30))?];
    if options.explain && choice == "auto" {
        println!("{}", relay.process.output());
    }
    let report = relay.report()?;
    let wire = report["transferred"].as_u64().context("a report lacks the bytes on the wire")?;
    if let Some(parts) = report["auto"]["codecs"].as_array() {
        let plain: u64 = parts.iter().filter_map(|part| part["plain"].as_u64()).sum();
        ensure!(
            report["plain"].as_u64() == Some(plain),
            "the report's codecs add up to {plain} bytes of {}",
            report["plain"]
        );
    }
    Ok(Some(Run { seconds, cpu: ended[0].cpu + ended[1].cpu, wire, report }))
}

/// The CPUs of the source's host and of the destination's.
fn halves(shared: bool) -> Result<[String; 2]> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let list = |cpus: &[usize]| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    if shared || cpus.len() < 2 {
        return Ok([list(&cpus), list(&cpus)]);
    }
    let (here, there) = cpus.split_at(cpus.len() / 2);
    Ok([list(here), list(there)])
}

/// Restricts this program and its children to the destination's CPUs.
fn keep_to(cpus: &str) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus.split(',') {
        set.set(cpu.parse()?);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Acts as the destination QEMU: receives the stream, compares it, and sends SHUT.
fn take(listener: &UnixListener, expected: &[u8]) -> Result<()> {
    let (mut socket, _) = listener.accept()?;
    let mut at = 0;
    let mut buffer = vec![0; 256 << 10];
    while at < expected.len() {
        let wanted = buffer.len().min(expected.len() - at);
        let got = socket.read(&mut buffer[..wanted])?;
        if got == 0 {
            bail!("the stream ended after {at} of {} bytes", expected.len());
        }
        ensure!(buffer[..got] == expected[at..at + got], "wrong bytes came out near byte {at}");
        at += got;
    }
    socket.write_all(&SHUT_OK)?;
    Ok(())
}
