//! The report of a migration as text, in the style of `info migrate`.

use crate::report::{ratio, Report};

impl Report {
    /// Formats the report in the style of `info migrate`, one figure a line.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| {
            out.push_str(&format!("{:<30}{value}\n", format!("{name}:")))
        };
        line("status", self.status.clone());
        if let Some(vm) = &self.vm {
            line("VM at the destination", vm.clone());
        }
        line("total time", format!("{} ms", self.total_time));
        if let Some(downtime) = self.downtime {
            let allowed =
                self.max_downtime.map_or(String::new(), |ms| format!(", {ms} ms allowed"));
            line("downtime", format!("{downtime} ms{allowed}"));
        }
        if let Some(percent) = self.throttle {
            line("guest slowed, at most", format!("{percent} %"));
        }
        if let Some(hidden) = self.hidden_downtime {
            line("hidden downtime, at most", format!("{hidden:.1} ms"));
        }
        let ratio = ratio(self.plain, self.transferred);
        line(
            "transferred",
            format!("{} bytes (QEMU's {} bytes / {ratio:.2})", self.transferred, self.plain),
        );
        line("throughput", format!("{:.1} Mbit/s", self.throughput));
        line("pages per second", format!("{:.0}", self.pages_per_second));
        line("normal", format!("{} pages", self.normal));
        line("duplicate", format!("{} pages", self.duplicate));
        if let Some(compression) = &self.compression {
            line("compression.pages", compression.pages.to_string());
            line("compression.busy", compression.busy.to_string());
            line("compression.busy-rate", format!("{:.2}", compression.busy_rate));
            line("compression.compressed-size", format!("{} bytes", compression.compressed_size));
            line("compression.compression-rate", format!("{:.2}", compression.compression_rate));
        }
        if let Some(delta) = &self.delta {
            line("delta.pages", format!("{} of {} kept", delta.pages, delta.stored));
        }
        if let Some(seed) = &self.seed {
            line("seed.pages", format!("{} not sent, of {} offered", seed.pages, seed.offered));
        }
        if let Some(chunks) = self.history_chunks {
            line("history-chunks", chunks.to_string());
        }
        for (number, accelerator) in self.accelerators.iter().enumerate() {
            line(&format!("accelerator of thread {number}"), summary(accelerator));
        }
        for (number, one) in self.qpl.iter().enumerate() {
            line(&format!("libqpl of thread {number}"), by_qpl(one));
        }
        if self.resumes > 0 {
            line(
                "resumes",
                format!("{} ({:.1} s without the peer)", self.resumes, self.seconds_lost),
            );
        }
        if let Some(auto) = &self.auto {
            line("bottleneck", auto.bottleneck.to_string());
            line("link, at most", format!("{:.1} Mbit/s", auto.link_peak));
            line("codecs", auto.codecs_in_words());
            line("last choice", auto.mix_in_words());
        }
        let shown =
            |cpu: Option<f64>| cpu.map_or("unknown".into(), |seconds| format!("{seconds:.2} s"));
        if self.cpu_seconds.source.is_some() {
            line("CPU, source relay", shown(self.cpu_seconds.source));
        }
        line("CPU, destination relay", shown(self.cpu_seconds.destination));
        out
    }
}

/// Formats one line about an accelerator.
pub(crate) fn summary(accelerator: &qat::Snapshot) -> String {
    let reasons: Vec<String> = accelerator
        .by_software
        .iter()
        .map(|(reason, count)| format!("{count} {}", reason.text()))
        .collect();
    let software = if reasons.is_empty() { "none".to_owned() } else { reasons.join(", ") };
    format!("{} pieces by the device; in software: {software}", accelerator.by_device)
}

/// Formats one line about a thread that uses libqpl.
fn by_qpl(one: &qpl::Snapshot) -> String {
    let software = one.failures + one.without;
    let why = one.last_failure.as_ref().map_or(String::new(), |why| format!(" ({why})"));
    format!("{} units; by libdeflate: {software}{why}", one.units)
}
