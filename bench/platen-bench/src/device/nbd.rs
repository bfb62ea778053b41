//! NBD, random 4 KiB, 16 in flight: platen against nbdkit's memory plugin with its zstd allocator.
//! Real pages from our own client, and fio's engine with its generated data.

use super::measure::{median, percentiles, Random};
use super::nbd_client::Client;
use super::{DeviceBenchArgs, PAGE};
use crate::program;
use anyhow::{bail, ensure, Context};
use serde_json::{json, Value};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server in a separate process, ended when dropped.
struct Server {
    name: &'static str,
    child: Child,
    socket: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The figures of one run: requests a second, the server's CPU microseconds a page, microseconds of
/// a request (p50, p99).
type Run = [f64; 4];

/// Requests in flight.
const DEPTH: usize = 16;

/// Real pages: written in order once, then written in random order, then read in random order.
pub(super) fn pages(
    args: &DeviceBenchArgs,
    name: &str,
    pages: &[u8],
) -> anyhow::Result<Option<Value>> {
    if !is_there("nbdkit") {
        return Ok(None);
    }
    let count = (pages.len() / PAGE) as u64;
    let title = format!("{name}: {count} pages by NBD on a unix socket");
    let folder = tempfile::tempdir()?;
    let servers = [platen(folder.path())?, nbdkit(folder.path())?];
    for server in &servers {
        let order: Vec<u64> = (0..count).collect();
        Client::new(&server.socket)?.run(pages, &order, true, DEPTH)?;
    }
    let mut random = Random(5);
    in_turns(args, &title, &servers, count, &mut |server, write| {
        let order = random.order(count);
        let (start, before) = (Instant::now(), cpu(&server.child)?);
        let mut times = Client::new(&server.socket)?.run(pages, &order, write, DEPTH)?;
        let seconds = start.elapsed().as_secs_f64();
        let used = cpu(&server.child)? - before;
        let (p50, p99) = percentiles(&mut times);
        Ok([count as f64 / seconds, used / count as f64, p50, p99])
    })
    .map(Some)
}

/// fio's generated data.
pub(super) fn made(args: &DeviceBenchArgs) -> anyhow::Result<Option<Value>> {
    if !is_there("nbdkit") || !is_there("fio") {
        return Ok(None);
    }
    let engines = Command::new("fio").arg("--enghelp").output().context("fio")?;
    if !String::from_utf8_lossy(&engines.stdout).contains("nbd") {
        println!("\nNBD with fio's data is left out: this fio has no nbd engine");
        return Ok(None);
    }
    let folder = tempfile::tempdir()?;
    let servers = [platen(folder.path())?, nbdkit(folder.path())?];
    for server in &servers {
        fio(server, "write", folder.path())?;
    }
    let title = "NBD on a unix socket, fio's data (60 % compressible)";
    in_turns(args, title, &servers, PAGES, &mut |server, write| {
        fio(server, if write { "randwrite" } else { "randread" }, folder.path())
    })
    .map(Some)
}

fn is_there(tool: &str) -> bool {
    let mut command = Command::new(tool);
    let found = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_err() {
        println!("\nNBD is left out: {tool} is not installed");
    }
    found.is_ok()
}

fn in_turns(
    args: &DeviceBenchArgs,
    title: &str,
    servers: &[Server; 2],
    pages: u64,
    run: &mut dyn FnMut(&Server, bool) -> anyhow::Result<Run>,
) -> anyhow::Result<Value> {
    let mut runs: [[Vec<Run>; 2]; 2] = Default::default();
    let mut ratios = [0.0; 2];
    for _ in 0..args.runs {
        for ((server, runs), ratio) in servers.iter().zip(&mut runs).zip(&mut ratios) {
            for (write, runs) in [true, false].into_iter().zip(runs) {
                runs.push(run(server, write)?);
            }
            // Resident memory, including memory that is not data: the only measure that both have.
            *ratio = pages as f64 * PAGE as f64 / resident(&server.child)?.max(1) as f64;
        }
    }
    println!("\n{title}, 4 KiB at random, {DEPTH} on the way, {} runs in turns", args.runs);
    println!(
        "{:<14}{:>12}{:>8}{:>8}{:>8}{:>12}{:>8}{:>8}{:>8}{:>20}",
        "",
        "writes a s",
        "us CPU",
        "p50",
        "p99",
        "reads a s",
        "us CPU",
        "p50",
        "p99",
        "plain by resident"
    );
    let mut rows = Vec::new();
    for ((server, runs), ratio) in servers.iter().zip(&runs).zip(ratios) {
        let of = |direction: usize, field: usize| {
            median(runs[direction].iter().map(|run| run[field]).collect())
        };
        let side = |direction: usize| {
            format!(
                "{:>12.0}{:>8.2}{:>8.0}{:>8.0}",
                of(direction, 0),
                of(direction, 1),
                of(direction, 2),
                of(direction, 3)
            )
        };
        println!("{:<14}{}{}{ratio:>20.2}", server.name, side(0), side(1));
        rows.push(json!({
            "server": server.name, "write_iops": of(0, 0), "write_cpu": of(0, 1), "write_p50": of(0, 2),
            "write_p99": of(0, 3), "read_iops": of(1, 0), "read_cpu": of(1, 1), "read_p50": of(1, 2),
            "read_p99": of(1, 3), "plain_by_resident": ratio, "runs": runs,
        }));
    }
    let value = |row: usize, field: &str| rows[row][field].as_f64().unwrap_or(f64::NAN);
    println!(
        "  platen: {:.2} times the writes, {:.2} times the reads",
        value(0, "write_iops") / value(1, "write_iops"),
        value(0, "read_iops") / value(1, "read_iops")
    );
    Ok(json!({ "part": "nbd", "title": title, "servers": rows }))
}

/// Pages of the part of the device that fio uses: all are written before the measurement.
const PAGES: u64 = 64 << 10;

fn platen(folder: &Path) -> anyhow::Result<Server> {
    let socket = folder.join("platen");
    let mut command = Command::new(program::platen()?);
    command.args(["device", "serve", "--size", "1G", "--codec", "zstd", "--level", "1"]);
    // The CPU time and memory of the started process must be the server's.
    command.args(["--no-supervisor", "--nbd"]);
    command.arg(format!("unix:{}", socket.display())).arg("--run-dir").arg(folder);
    start("platen zstd 1", command, &socket)
}

fn nbdkit(folder: &Path) -> anyhow::Result<Server> {
    let socket = folder.join("nbdkit");
    let mut command = Command::new("nbdkit");
    command.arg("-f").arg("-U").arg(&socket).args(["memory", "1G", "allocator=zstd"]);
    start("nbdkit zstd", command, &socket)
}

fn start(name: &'static str, mut command: Command, socket: &Path) -> anyhow::Result<Server> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.with_context(|| format!("cannot start {name}"))?;
    let mut server = Server { name, child, socket: socket.to_owned() };
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if let Some(status) = server.child.try_wait()? {
            bail!("{name} has ended: {status}");
        }
        ensure!(start.elapsed() < Duration::from_secs(10), "{name} does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(server)
}

fn fio(server: &Server, direction: &str, folder: &Path) -> anyhow::Result<Run> {
    let output = folder.join("fio.json");
    let bytes = PAGES * 4096;
    let before = cpu(&server.child)?;
    let status = Command::new("fio")
        .args(["--name=bench", "--ioengine=nbd", "--bs=4k", "--iodepth=16", "--output-format=json"])
        .args([
            "--buffer_compress_percentage=60",
            "--refill_buffers",
            "--randrepeat=0",
            "--norandommap",
        ])
        .arg(format!("--uri=nbd+unix:///?socket={}", server.socket.display()))
        .arg(format!("--rw={direction}"))
        .arg(format!("--size={bytes}"))
        .arg("--output")
        .arg(&output)
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    ensure!(status.success(), "fio against {}: {status}", server.name);
    let used = cpu(&server.child)? - before;
    let text = fs::read_to_string(&output)?;
    // The engine's own lines come first.
    let text = &text[text.find('{').context("fio printed no JSON")?..];
    let result: Value = serde_json::from_str(text)?;
    let side = if direction.contains("read") { "read" } else { "write" };
    let side = &result["jobs"][0][side];
    let iops = side["iops"].as_f64().context("no figure from fio")?;
    // From the histogram of the time since submission to the engine: buckets of 1.5 %, nanoseconds.
    let at = |part: &str| side["clat_ns"]["percentile"][part].as_f64().unwrap_or(f64::NAN) / 1e3;
    let pages = side["total_ios"].as_f64().unwrap_or(1.0).max(1.0);
    Ok([iops, used / pages, at("50.000000"), at("99.000000")])
}

/// Microseconds of CPU time of a process, with a resolution of 10 ms.
fn cpu(child: &Child) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
    // The name may contain spaces; it ends at the last bracket.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let all = ticks(11).zip(ticks(12)).context("/proc/PID/stat")?;
    Ok((all.0 + all.1) as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}

/// Bytes of a process's resident memory, including shared memory.
fn resident(child: &Child) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/statm", child.id()))?;
    let pages = text.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    Ok(pages.context("/proc/PID/statm")? * 4096)
}
