//! NBD, random 4 KiB, 16 on the way: platen beside nbdkit's memory plugin with its zstd allocator.

use super::{median, DeviceBenchArgs};
use anyhow::{bail, ensure, Context};
use serde_json::{json, Value};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server in a process of its own, ended when dropped.
struct Server {
    name: &'static str,
    child: Child,
    uri: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or not: both are fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is measured of one run: requests a second, server's CPU microseconds a page.
type Run = [f64; 2];

pub(super) fn measure(args: &DeviceBenchArgs) -> anyhow::Result<Option<Value>> {
    for tool in ["fio", "nbdkit"] {
        let mut command = Command::new(tool);
        let found = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            println!("\nNBD is left out: {tool} is not installed");
            return Ok(None);
        }
    }
    let engines = Command::new("fio").arg("--enghelp").output().context("fio")?;
    if !String::from_utf8_lossy(&engines.stdout).contains("nbd") {
        println!("\nNBD is left out: this fio has no nbd engine");
        return Ok(None);
    }
    let folder = tempfile::tempdir()?;
    let servers = [platen(folder.path())?, nbdkit(folder.path())?];
    let mut runs: [[Vec<Run>; 2]; 2] = Default::default();
    let mut ratios = [0.0; 2];
    for _ in 0..args.runs {
        for ((server, runs), ratio) in servers.iter().zip(&mut runs).zip(&mut ratios) {
            for (direction, runs) in ["randwrite", "randread"].iter().zip(runs) {
                runs.push(fio(server, direction, folder.path())?);
            }
            // Resident memory, what is not data included: the only measure that both have.
            *ratio = PAGES as f64 * 4096.0 / resident(&server.child)?.max(1) as f64;
        }
    }
    println!("\nNBD on a unix socket, fio (60 % compressible), 4 KiB at random, 16 on the way, {} runs in turns", args.runs);
    println!(
        "{:<14}{:>14}{:>12}{:>14}{:>12}{:>20}",
        "", "writes a s", "us CPU", "reads a s", "us CPU", "plain by resident"
    );
    let mut rows = Vec::new();
    for ((server, runs), ratio) in servers.iter().zip(&runs).zip(ratios) {
        let of = |direction: usize, field: usize| {
            median(runs[direction].iter().map(|run| run[field]).collect())
        };
        println!(
            "{:<14}{:>14.0}{:>12.2}{:>14.0}{:>12.2}{:>20.2}",
            server.name,
            of(0, 0),
            of(0, 1),
            of(1, 0),
            of(1, 1),
            ratio
        );
        rows.push(json!({
            "server": server.name, "write_iops": of(0, 0), "write_cpu": of(0, 1),
            "read_iops": of(1, 0), "read_cpu": of(1, 1), "plain_by_resident": ratio, "runs": runs,
        }));
    }
    let value = |row: usize, field: &str| rows[row][field].as_f64().unwrap_or(f64::NAN);
    println!(
        "  platen: {:.2} times the writes, {:.2} times the reads",
        value(0, "write_iops") / value(1, "write_iops"),
        value(0, "read_iops") / value(1, "read_iops")
    );
    Ok(Some(json!({ "part": "nbd", "servers": rows })))
}

/// Pages of the part of the device that is used: all are written before anything is measured.
const PAGES: u64 = 64 << 10;

fn platen(folder: &Path) -> anyhow::Result<Server> {
    let socket = folder.join("platen");
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["device", "serve", "--size", "1G", "--codec", "zstd", "--level", "1"]);
    // Its CPU time and memory are those of the process that is started.
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
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut server = Server { name, child, uri };
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if let Some(status) = server.child.try_wait()? {
            bail!("{name} has ended: {status}");
        }
        ensure!(start.elapsed() < Duration::from_secs(10), "{name} does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    fio(&server, "write", socket.parent().unwrap_or(Path::new("/")))?;
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
        .arg(format!("--uri={}", server.uri))
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
    // Lines of the engine's come first.
    let text = &text[text.find('{').context("fio printed no JSON")?..];
    let result: Value = serde_json::from_str(text)?;
    let side = if direction.contains("read") { "read" } else { "write" };
    let side = &result["jobs"][0][side];
    let iops = side["iops"].as_f64().context("no figure from fio")?;
    Ok([iops, used / side["total_ios"].as_f64().unwrap_or(1.0).max(1.0)])
}

/// Microseconds of CPU that a process has used, to 10 ms.
fn cpu(child: &Child) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
    // The name may have spaces in it; it ends at the last bracket.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let all = ticks(11).zip(ticks(12)).context("/proc/PID/stat")?;
    Ok((all.0 + all.1) as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}

/// Bytes of memory that a process has, shared memory included.
fn resident(child: &Child) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/statm", child.id()))?;
    let pages = text.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    Ok(pages.context("/proc/PID/statm")? * 4096)
}
