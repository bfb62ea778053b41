//! A Prometheus endpoint: text format 0.0.4 over HTTP/1.1, one client at a time.
//!
//! A client has two seconds and 4 KiB for its request and gets one answer. The I/O path does not
//! use the endpoint.

use super::endpoint::{Endpoint, Listener};
use super::status::Status;
use crate::say::say;
use policy::Field;
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(2);
const REQUEST: usize = 4096;
/// The shortest time-out of a socket: zero would mean no time-out.
const A_MOMENT: Duration = Duration::from_millis(1);

/// Answers until the endpoint is dropped.
pub(crate) fn start(
    listener: TcpListener,
    status: impl Fn() -> Status + Send + 'static,
) -> anyhow::Result<Endpoint> {
    say(&format!("metrics on http://{}/metrics", listener.local_addr()?));
    serve_text(listener, move || text(&status()))
}

/// Answers with the text that `text` returns, in Prometheus's format, until the endpoint is
/// dropped.
pub(crate) fn serve_text<L>(
    listener: L,
    text: impl Fn() -> String + Send + 'static,
) -> anyhow::Result<Endpoint>
where
    L: Listener,
    L::Stream: AsFd,
    for<'a> &'a L::Stream: Read + Write,
{
    Endpoint::start("metrics", listener, move |stream| serve(stream, &text))
}

fn serve<S>(stream: &S, text: impl Fn() -> String) -> std::io::Result<()>
where
    S: AsFd,
    for<'a> &'a S: Read + Write,
{
    let deadline = Instant::now() + PATIENCE;
    rustix::io::ioctl_fionbio(stream, false)?;
    set_socket_timeout(stream, Timeout::Send, Some(PATIENCE))?;
    let mut request = [0; REQUEST];
    let (mut len, mut is_last) = (0, false);
    // Up to the end of the headers, or to the limit. A thread that gets no CPU until the deadline
    // is over reads once what waits in the socket: the client was in time.
    while len < REQUEST && !request[..len].windows(4).any(|end| end == b"\r\n\r\n") {
        if is_last {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        is_last = left.is_zero();
        set_socket_timeout(stream, Timeout::Recv, Some(left.max(A_MOMENT)))?;
        match (&mut &*stream).read(&mut request[len..])? {
            0 => break,
            got => len += got,
        }
    }
    let (code, kind, body) = answer(&request[..len], text);
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    (&mut &*stream).write_all(&[head.as_bytes(), body.as_bytes()].concat())
}

fn answer(request: &[u8], text: impl Fn() -> String) -> (&'static str, &'static str, String) {
    const PLAIN: &str = "text/plain; charset=utf-8";
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics" | b"/")) => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text())
        }
        (Some(b"GET"), Some(_)) => ("404 Not Found", PLAIN, "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", PLAIN, "GET only\n".to_owned()),
    }
}

/// The counters in Prometheus's text format. Monotonic ones have the type counter and the suffix
/// `_total`.
pub(crate) fn text(status: &Status) -> String {
    let mut text = String::new();
    // Neither value can contain a character that needs escaping: see their parsers.
    let labels = format!("{{device=\"{}\",codec=\"{}\"}}", status.name, status.codec);
    let disksize = [("disksize", status.disksize, "Size of the device, bytes", false)];
    let fields = disksize
        .into_iter()
        .chain(status.mm_stat.fields())
        .chain(status.io_stat.fields())
        .chain(status.bd_stat.fields())
        .chain(status.platen.fields())
        .chain(status.dictionaries.iter().flat_map(|dictionaries| dictionaries.fields()))
        .chain(status.backing.iter().flat_map(|backing| backing.fields()));
    let put = |text: &mut String, part: &str, (name, value, help, grows): Field| {
        let (suffix, kind) = if grows { ("_total", "counter") } else { ("", "gauge") };
        let name = format!("platen_device_{part}{name}{suffix}");
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}")
            .expect("a string takes all");
    };
    fields.for_each(|field| put(&mut text, "", field));
    let policy = status.policy.iter().flat_map(|policy| policy.fields());
    policy.for_each(|field| put(&mut text, "policy_", field));
    if let Some(accelerated) = &status.accelerator {
        let fields = accelerated.fields().into_iter();
        fields.for_each(|field| put(&mut text, "accelerator_", field));
        let name = "platen_device_accelerator_redone_by_reason_total";
        writeln!(text, "# HELP {name} Pages done in software, by reason\n# TYPE {name} counter")
            .expect("a string takes all");
        for (reason, count) in &accelerated.reasons {
            writeln!(
                text,
                "{name}{{device=\"{}\",codec=\"{}\",reason=\"{reason}\"}} {count}",
                status.name, status.codec
            )
            .expect("a string takes all");
        }
    }
    for (name, value, help) in status.flags() {
        put(&mut text, "", (name, value, help, false));
    }
    let connections: usize = status.transports.iter().map(|way| way.connections).sum();
    put(&mut text, "", ("connections", connections as u64, "Connected clients", false));
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::status::{Accelerated, BackingStatus, DictionaryStatus};
    use super::*;
    use device::{Device, DeviceOptions};
    use policy::{Policy, Settings};
    use store::{Options, Store};

    pub(crate) fn status() -> Status {
        let store = Store::create(64, Options::default()).unwrap();
        let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
        let device = Device::new(&store, &options).unwrap();
        device.queue().unwrap().write_now(3, &b"platen00".repeat(1024)).unwrap();
        let policy = Policy::start(&store, &Settings::default()).unwrap();
        Status::of("swap0", &device, Vec::new(), Some(&policy), None)
    }

    /// A status with every part.
    pub(crate) fn example_status() -> Status {
        Status {
            backing: Some(BackingStatus::default()),
            accelerator: Some(Accelerated::default()),
            dictionaries: Some(DictionaryStatus::default()),
            pressure: Some("trigger".to_owned()),
            ..status()
        }
    }

    #[test]
    fn every_line_is_a_comment_or_a_sample_with_its_type_before_it() {
        let text = text(&status());
        let mut declared = String::new();
        let mut samples = 0;
        for line in text.lines() {
            if let Some(comment) = line.strip_prefix("# TYPE ") {
                declared = comment.split(' ').next().unwrap().to_owned();
            } else if !line.starts_with("# HELP ") {
                let (name, rest) = line.split_once('{').unwrap();
                assert_eq!(name, declared);
                let (labels, value) = rest.split_once("} ").unwrap();
                assert_eq!(labels, "device=\"swap0\",codec=\"zstd\"");
                value.parse::<u64>().unwrap();
                samples += 1;
            }
        }
        assert_eq!(samples, 25 + 2 + 28 + 3);
        assert!(
            text.contains("platen_device_orig_data_size{device=\"swap0\",codec=\"zstd\"} 8192\n")
        );
        assert!(text.contains("platen_device_same_pages{device=\"swap0\",codec=\"zstd\"} 2\n"));
    }

    #[test]
    fn damage_is_a_metric() {
        let mut status = status();
        status.pressure = Some("trigger".to_owned());
        status.backing = Some(BackingStatus::default());
        let values = |status: &Status| {
            let text = text(status);
            ["damage", "writeback_stopped", "backing_refused", "pressure_known"].map(|name| {
                let sample = format!("\nplaten_device_{name}{{device=\"swap0\",codec=\"zstd\"}} ");
                text.split(&sample).nth(1).and_then(|rest| rest.lines().next()?.parse().ok())
            })
        };
        assert_eq!(values(&status), [Some(0), Some(0), Some(0), Some(1)]);
        status.platen.damage = Some("page 3".to_owned());
        status.pressure = Some("none".to_owned());
        let (stopped, refused) = (Some("EIO".to_owned()), Some("another store's".to_owned()));
        status.backing = Some(BackingStatus { stopped, refused, ..BackingStatus::default() });
        assert_eq!(values(&status), [Some(1), Some(1), Some(1), Some(0)]);
    }

    #[test]
    fn only_metrics_are_served() {
        let code = |request: &str| answer(request.as_bytes(), String::new).0;
        assert_eq!(code("GET /metrics HTTP/1.1\r\n\r\n"), "200 OK");
        assert_eq!(code("GET /etc/passwd HTTP/1.1\r\n\r\n"), "404 Not Found");
        assert_eq!(code("POST /metrics HTTP/1.1\r\n\r\n"), "405 Method Not Allowed");
        assert_eq!(code(""), "405 Method Not Allowed");
        assert_eq!(code("GET"), "405 Method Not Allowed");
    }
}
