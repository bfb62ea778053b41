//! `platen-bench hop`: the cost of a migration through both relays.
//!
//! A synthetic QEMU stream of real pages goes over a unix socket into `platen relay`, over loopback
//! TCP into `platen receive`, and out over a unix socket, where its bytes are compared. The relays
//! are separate processes: the CPU time is theirs alone, user and system, including hashes; it
//! excludes the threads that act as QEMU.

use crate::watch::{thread_cpu, Watch};
use crate::{device, program};
use anyhow::{bail, ensure, Context};
use clap::Args;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use stream::synth::{main_stream, multifd_streams, Style};
use stream::{Kind, Tokeniser};

/// The bytes in one sendmsg of QEMU: 64 pieces, headers and pages alternating.
const WRITE_BYTES: usize = 32 * (8 + 4096);
/// The pause between two looks at the relays' counters: a look costs CPU time of this program.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
/// QEMU's message once it has loaded the VM: SHUT, 4 bytes, 0.
const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

/// Arguments of `platen-bench hop`.
#[derive(Args, Debug)]
pub(crate) struct HopArgs {
    /// MiB of guest memory in the stream
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=16384))]
    mib: u32,
    /// Runs of each kind, interleaved; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Pages of one set of the corpus, in their order, instead of MIB of all
    #[arg(long, value_name = "NAME")]
    set: Option<String>,
    /// Codecs to run, each perhaps with its level and the relay's --history: zstd:6:8M, auto::0
    #[arg(long, value_delimiter = ',', default_value = "none,lz4,zstd")]
    codecs: Vec<Way>,
    /// The relay's --max-bandwidth
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<String>,
    /// Multifd channels to run; 0 is a single stream
    #[arg(long, value_delimiter = ',', default_value = "0,2")]
    channels: Vec<u8>,
    /// Compression threads, and as many decompression threads, of the relays to run [default: the
    /// relays' own]
    #[arg(long, value_delimiter = ',', value_name = "N,...",
          value_parser = clap::value_parser!(u16).range(1..=255))]
    threads: Vec<u16>,
    /// TCP connections between the relays to run (the relay's --links) [default: the relay's own]
    #[arg(long, value_delimiter = ',', value_name = "N,...",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    links: Vec<u16>,
    /// Each kind also with mutual TLS between the relays, interleaved with that without
    #[arg(long)]
    tls: bool,
    /// Each kind only with mutual TLS
    #[arg(long, conflicts_with = "tls")]
    tls_only: bool,
    /// Write the figures to this file as JSON, after each round of runs anew
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How the relay compresses.
#[derive(Debug, Clone)]
struct Way {
    text: String,
    options: Vec<String>,
}

impl FromStr for Way {
    type Err = String;

    /// `CODEC[:LEVEL[:HISTORY]]`; the relay checks the values.
    fn from_str(text: &str) -> Result<Self, String> {
        let (names, mut values) = (["--codec", "--level", "--history"], text.split(':'));
        let mut options = Vec::new();
        for (name, value) in names.iter().zip(&mut values) {
            if !value.is_empty() {
                options.extend([(*name).to_string(), value.to_string()]);
            }
        }
        match values.next() {
            None => Ok(Self { text: text.into(), options }),
            Some(more) => Err(format!("'{more}' is too much: CODEC[:LEVEL[:HISTORY]]")),
        }
    }
}

/// One migration. Memory is the most that each relay had; the stages are the threads of both by
/// name, source first, in CPU seconds.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Run {
    /// CPU seconds of both relays.
    cpu: f64,
    source_cpu: f64,
    destination_cpu: f64,
    seconds: f64,
    wire: u64,
    source_peak_kib: u64,
    destination_peak_kib: u64,
    source_stages: BTreeMap<String, f64>,
    destination_stages: BTreeMap<String, f64>,
    /// Of the stages' threads, the busiest of each name.
    source_busiest: BTreeMap<String, f64>,
    destination_busiest: BTreeMap<String, f64>,
    /// CPU seconds of this program, which plays both QEMUs, and of its busiest thread.
    bench_cpu: f64,
    bench_busiest: f64,
}

/// A kind of run.
struct Case<'a> {
    channels: u8,
    streams: &'a [Vec<u8>],
    /// The place in the main stream where the VM stops.
    stop: usize,
    way: &'a Way,
    threads: Option<u16>,
    links: Option<u16>,
    certificates: Option<&'a Path>,
    max_bandwidth: Option<&'a str>,
}

pub(crate) fn run(args: &HopArgs) -> anyhow::Result<()> {
    let corpus = corpus::Corpus::load();
    let pages = match &args.set {
        None => corpus.rounds().bytes((args.mib as usize) << 20),
        Some(name) => {
            let set = corpus.set(name);
            set.with_context(|| format!("no set {name} in {:?}", corpus.names()))?.pages().to_vec()
        }
    };
    println!(
        "{} MiB of {:?}; medians of {} interleaved runs",
        pages.len() >> 20,
        corpus.origin(),
        args.runs
    );
    let streams: Vec<_> = args.channels.iter().map(|&number| streams(number, &pages)).collect();
    drop(pages);
    let ca = tempfile::Builder::new().prefix("platen-ca-").tempdir()?;
    let certificates = if args.tls || args.tls_only {
        let authority = tls::Authority::at(&ca.path().join("ca"));
        authority.init(false)?;
        Some(authority.issue(&["127.0.0.1".into()], 2, false)?.dir)
    } else {
        None
    };
    let with_tls = certificates.as_deref().map(Some);
    let without = (!args.tls_only).then_some(None);
    let ways = args.codecs.iter().flat_map(|way| {
        let each = asked(&args.threads)
            .flat_map(|threads| asked(&args.links).map(move |links| (threads, links)));
        each.map(move |(threads, links)| (way, threads, links))
    });
    let ways: Vec<_> = ways.collect();
    let mut cases = Vec::new();
    for (&channels, streams) in args.channels.iter().zip(&streams) {
        let stop = if channels == 0 { 0 } else { stop(&streams[0]) };
        for &(way, threads, links) in &ways {
            // The case without TLS comes directly before the one with it.
            cases.extend(without.into_iter().chain(with_tls).map(|certificates| Case {
                channels,
                streams,
                stop,
                way,
                threads,
                links,
                certificates,
                max_bandwidth: args.max_bandwidth.as_deref(),
            }));
        }
    }
    let mut runs: Vec<Vec<Run>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.runs {
        for (case, runs) in cases.iter().zip(&mut runs) {
            runs.push(one(case)?);
        }
        if let Some(path) = &args.json {
            let rows: Vec<_> =
                cases.iter().zip(&runs).map(|(case, runs)| row(case, runs).to_string()).collect();
            std::fs::write(path, format!("{{\"hop\": [\n{}\n]}}\n", rows.join(",\n")))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    show(&cases, &runs);
    Ok(())
}

/// The numbers asked for; without any, the relays' own.
fn asked(numbers: &[u16]) -> impl Iterator<Item = Option<u16>> + '_ {
    let own = numbers.is_empty().then_some(None);
    own.into_iter().chain(numbers.iter().copied().map(Some))
}

/// Medians of a case's runs.
struct Middle {
    /// CPU seconds of both relays for a GiB.
    cpu: f64,
    /// GB/s of QEMU's streams.
    rate: f64,
    ratio: f64,
}

impl Middle {
    fn of(case: &Case<'_>, runs: &[Run]) -> Self {
        let plain = case.plain() as f64;
        let gib = plain / f64::from(1 << 30);
        Self {
            cpu: median(runs.iter().map(|run| run.cpu / gib)),
            rate: median(runs.iter().map(|run| plain / 1e9 / run.seconds)),
            ratio: median(runs.iter().map(|run| plain / run.wire as f64)),
        }
    }
}

impl Case<'_> {
    /// Bytes of QEMU's streams.
    fn plain(&self) -> usize {
        self.streams.iter().map(Vec::len).sum()
    }
}

fn show(cases: &[Case<'_>], runs: &[Vec<Run>]) {
    println!(
        "{:<10} {:<10} {:<8} {:<8} {:<4} {:>22} {:>10} {:>8} {:>10}",
        "channels",
        "codec",
        "threads",
        "links",
        "TLS",
        "CPU s/GiB, both relays",
        "GB/s",
        "ratio",
        "TLS costs"
    );
    let mut plain_cpu = None;
    for (case, runs) in cases.iter().zip(runs) {
        let Middle { cpu, rate, ratio } = Middle::of(case, runs);
        let tls = case.certificates.is_some();
        let cost = plain_cpu.filter(|_| tls).map(|plain| (cpu / plain - 1.0) * 100.0);
        plain_cpu = (!tls).then_some(cpu);
        let number = |asked: Option<u16>| asked.map_or("default".to_owned(), |n| n.to_string());
        println!(
            "{:<10} {:<10} {:<8} {:<8} {:<4} {cpu:>22.3} {rate:>10.2} {ratio:>8.2} {:>10}",
            case.channels,
            case.way.text,
            number(case.threads),
            number(case.links),
            if tls { "yes" } else { "no" },
            cost.map_or(String::new(), |cost| format!("{cost:+.1} %"))
        );
    }
    println!(
        "(the bench itself, playing both QEMUs on the same cores, used {:.1} CPU s)",
        device::process_cpu() / 1e6
    );
}

fn row(case: &Case<'_>, runs: &[Run]) -> serde_json::Value {
    let Middle { cpu, rate, ratio } = Middle::of(case, runs);
    json!({
        "channels": case.channels, "codec": case.way.text, "threads": case.threads,
        "links": case.links, "cpu-seconds-per-gib": cpu, "gigabytes-per-second": rate,
        "ratio": ratio, "runs": runs.len(), "tls": case.certificates.is_some(),
        "plain": case.plain(), "each": runs,
    })
}

/// QEMU's streams with this number of multifd channels: the main stream first.
fn streams(channels: u8, pages: &[u8]) -> Vec<Vec<u8>> {
    let pages = pages.chunks_exact(4096);
    if channels == 0 {
        return vec![main_stream(Style::Qemu72, 4096, pages)];
    }
    let (main, channels) = multifd_streams(Style::Qemu72, 4096, channels, pages);
    std::iter::once(main).chain(channels).collect()
}

/// The place in a main stream where it tells that the VM has stopped. QEMU writes the bytes from
/// there on behind all pages of its channels.
fn stop(main: &[u8]) -> usize {
    const STEP: usize = 16;
    let (mut tokeniser, mut tokens) = (Tokeniser::new(Kind::Main, 4096), Vec::new());
    let has_stopped = main.chunks(STEP).position(|part| {
        tokens.clear();
        tokeniser.feed(part, &mut tokens);
        tokeniser.facts().vm_stopped_hint
    });
    has_stopped.map_or(main.len(), |steps| steps * STEP)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A child that does not outlive the bench.
struct Relay(Child);

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a relay and waits for its first line; returns the text behind "listening on " there.
fn start(args: &[String]) -> anyhow::Result<(Relay, String)> {
    let child = Command::new(program::platen()?)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.context("cannot start a relay")?;
    let mut errors = BufReader::new(child.stderr.take().context("a relay has no stderr")?);
    let relay = Relay(child);
    let mut line = String::new();
    errors.read_line(&mut line)?;
    let Some((_, address)) = line.trim().split_once("listening on ") else {
        bail!("a relay did not start: {line}");
    };
    let address = address.split(' ').next().unwrap_or_default().to_string();
    // Read continuously: otherwise a full pipe would block the relay.
    std::thread::spawn(move || {
        errors.lines().map_while(Result::ok).for_each(|line| eprintln!("  {line}"))
    });
    Ok((relay, address))
}

/// One migration; with TLS if the case has certificates.
fn one(case: &Case<'_>) -> anyhow::Result<Run> {
    let streams = case.streams;
    let dir = tempfile::Builder::new().prefix("platen-hop-").tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let unix = |name: &str| format!("unix:{}", path(name).display());
    let security = match case.certificates {
        Some(dir) => vec!["--tls-dir".to_string(), dir.display().to_string()],
        None => vec!["--insecure".to_string()],
    };
    let arguments = |list: &[&str]| {
        list.iter().map(|word| (*word).to_string()).chain(security.clone()).collect::<Vec<_>>()
    };
    let listener = UnixListener::bind(path("out"))?;
    let json = |name: &str| path(name).display().to_string();
    let mut receiving = arguments(&[
        "receive",
        "--listen",
        "127.0.0.1:0",
        "--deliver",
        &unix("out"),
        "--once",
        "--json",
        &json("receive.json"),
    ]);
    if let Some(threads) = case.threads {
        receiving.extend(["--decompress-threads".into(), threads.to_string()]);
    }
    let (receive, address) = start(&receiving)?;
    let mut sending = arguments(&[
        "relay",
        "--listen",
        &unix("in"),
        "--peer",
        &address,
        "--json",
        &json("relay.json"),
    ]);
    sending.extend_from_slice(&case.way.options);
    for (option, value) in [
        ("--max-bandwidth", case.max_bandwidth.map(String::from)),
        ("--compress-threads", case.threads.map(|threads| threads.to_string())),
        ("--links", case.links.map(|links| links.to_string())),
    ] {
        sending.extend(value.into_iter().flat_map(|value| [option.into(), value]));
    }
    let (relay, _) = start(&sending)?;
    let mut watches = [Watch::new(relay.0.id()), Watch::new(receive.0.id())];
    let pages_written = &Barrier::new(streams.len());
    let (started, bench_cpu) = (Instant::now(), device::process_cpu());
    let bench_busiest = std::thread::scope(|scope| -> anyhow::Result<f64> {
        let sinks = scope.spawn(|| take_all(&listener, streams));
        let mut sockets = Vec::new();
        for (number, bytes) in streams.iter().enumerate() {
            let socket = UnixStream::connect(path("in"))?;
            let mut writing = socket.try_clone()?;
            let begin = if number == 0 { case.stop } else { bytes.len() };
            sockets.push((
                socket,
                scope.spawn(move || -> std::io::Result<f64> {
                    let mut write = |bytes: &[u8]| {
                        bytes.chunks(WRITE_BYTES).try_for_each(|chunk| writing.write_all(chunk))
                    };
                    let written = write(&bytes[..begin]);
                    pages_written.wait();
                    written.and_then(|()| write(&bytes[begin..]))?;
                    Ok(thread_cpu())
                }),
            ));
        }
        let mut looked = Instant::now();
        while !sockets.iter().all(|(_, written)| written.is_finished()) {
            std::thread::park_timeout(Duration::from_millis(1));
            if looked.elapsed() > BETWEEN_LOOKS {
                watches.iter_mut().for_each(Watch::look);
                looked = Instant::now();
            }
        }
        watches.iter_mut().for_each(Watch::look);
        let mut shut = [0; 8];
        (&sockets[0].0).read_exact(&mut shut).context("no SHUT came back")?;
        watches.iter_mut().for_each(Watch::look);
        ensure!(shut == SHUT_OK, "the return path brought {shut:02x?}");
        let mut busiest = sinks.join().map_err(|_| anyhow::anyhow!("the sink panicked"))??;
        for (_, writer) in sockets {
            let cpu = writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
            busiest = busiest.max(cpu);
        }
        Ok(busiest)
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let bench_cpu = (device::process_cpu() - bench_cpu) / 1e6;
    wait(relay)?;
    wait(receive)?;
    let source = report(&path("relay.json"))?;
    let destination = report(&path("receive.json"))?;
    let cpu = |report: &serde_json::Value, end: &str| report["cpu-seconds"][end].as_f64();
    let cpu = cpu(&source, "source")
        .zip(cpu(&destination, "destination"))
        .context("a report lacks CPU seconds")?;
    let wire = source["transferred"].as_u64().context("a report lacks the bytes on the wire")?;
    let [sending, receiving] = &watches;
    Ok(Run {
        cpu: cpu.0 + cpu.1,
        source_cpu: cpu.0,
        destination_cpu: cpu.1,
        seconds,
        wire,
        source_peak_kib: sending.peak_kib(),
        destination_peak_kib: receiving.peak_kib(),
        source_stages: sending.stages(),
        destination_stages: receiving.stages(),
        source_busiest: sending.busiest(),
        destination_busiest: receiving.busiest(),
        bench_cpu,
        bench_busiest,
    })
}

fn wait(mut relay: Relay) -> anyhow::Result<()> {
    let status = relay.0.wait()?;
    ensure!(status.success(), "a relay ended with {status}");
    Ok(())
}

fn report(path: &Path) -> anyhow::Result<serde_json::Value> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("no report {}", path.display()))?;
    serde_json::from_str(text.trim()).with_context(|| format!("report {}", path.display()))
}

/// Acts as the destination QEMU: reads every stream, compares it, and sends SHUT. Returns the CPU
/// seconds of the busiest thread.
fn take_all(listener: &UnixListener, streams: &[Vec<u8>]) -> anyhow::Result<f64> {
    std::thread::scope(|scope| {
        let mut main = None;
        let mut takers = Vec::new();
        for at in 0..streams.len() {
            let (socket, _) = listener.accept()?;
            if at == 0 {
                main = Some(socket.try_clone()?);
            }
            takers.push(scope.spawn(move || take(socket, streams)));
        }
        let mut busiest = 0.0_f64;
        for taker in takers {
            let cpu = taker.join().map_err(|_| anyhow::anyhow!("a sink panicked"))??;
            busiest = busiest.max(cpu);
        }
        main.context("no main stream came")?.write_all(&SHUT_OK)?;
        Ok(busiest)
    })
}

fn take(mut socket: UnixStream, streams: &[Vec<u8>]) -> anyhow::Result<f64> {
    let mut first = [0; 32];
    socket.read_exact(&mut first)?;
    let expected =
        streams.iter().find(|bytes| bytes[..32] == first).context("an unknown stream came out")?;
    let mut at = first.len();
    let mut buffer = vec![0; 256 << 10];
    while at < expected.len() {
        let wanted = buffer.len().min(expected.len() - at);
        let got = socket.read(&mut buffer[..wanted])?;
        ensure!(got > 0, "the stream ended after {at} of {} bytes", expected.len());
        ensure!(buffer[..got] == expected[at..at + got], "wrong bytes came out near byte {at}");
        at += got;
    }
    Ok(thread_cpu())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_main_stream_of_channels_stops_behind_the_barriers_of_their_pages() {
        let pages: Vec<u8> =
            (0..9000_u32).flat_map(|number| number.to_le_bytes().repeat(1024)).collect();
        let main = &streams(2, &pages)[0];
        let at = stop(main);
        // The state of the devices, 20,000 bytes and their names, is behind it.
        assert!((20_000..20_400).contains(&(main.len() - at)), "{at} of {}", main.len());
        assert_eq!(stop(&main[..at]), at);
    }
}
