//! The report for people.

use super::report::{Advice, Choice, Codec, QplFound, Report};
use crate::size::Size;
use advise::{Feature, Origin, Verdict};
use std::fmt::Write;

impl Report {
    /// The report for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        for advice in &self.advice {
            advice.write(out)?;
            writeln!(out)?;
        }
        self.memory(out)?;
        writeln!(out)?;
        self.measured(out)
    }

    /// The host, the VM and the codecs.
    fn measured(&self, out: &mut String) -> std::fmt::Result {
        let host = &self.host;
        writeln!(out, "this host")?;
        let cpus = host.cpus.map_or("?".into(), |cpus| cpus.to_string());
        let load = host.load.map_or(String::new(), |load| format!(", load {:.1}", load[0]));
        let name = host.processor.as_deref().unwrap_or("unknown processor");
        writeln!(out, "  CPUs          {cpus} x {name}{load}")?;
        let size = |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| Size(bytes).to_string());
        let memory = &host.memory;
        writeln!(
            out,
            "  memory        {}, {} available, huge pages {} ({} free), transparent ones {}",
            size(memory.total),
            size(memory.available),
            Size(memory.huge_pages),
            Size(memory.huge_pages_free),
            memory.transparent.as_deref().unwrap_or("?")
        )?;
        writeln!(out, "  first write   {:.1} us of CPU for a page of 4 KiB", self.first_touch)?;
        for nic in &host.nics {
            let speed = nic.speed.map_or("unknown speed".into(), |mbit| format!("{mbit} Mbit/s"));
            let driver = nic.driver.as_deref().unwrap_or("no driver");
            let up = if nic.up { "up" } else { "down" };
            writeln!(out, "  interface     {}: {speed}, {up}, {driver}", nic.name)?;
        }
        let found = &host.accelerators;
        let usable = if found.usable_qat() > 0 { "usable" } else { "not usable" };
        let lacks = found.qat_lacks.first().filter(|_| !found.qat.is_empty());
        let lacks =
            lacks.map_or(String::new(), |what| format!(": lacks {what} (platen qat status)"));
        match found.qat.len() {
            0 => writeln!(out, "  QAT           none")?,
            count => writeln!(out, "  QAT           {count} devices, {usable}{lacks}")?,
        }
        match found.iaa.len() {
            0 => writeln!(out, "  IAA           none")?,
            count => writeln!(
                out,
                "  IAA           {count} devices, {} of them usable (--codec qpl)",
                self.usable_iaa
            )?,
        }
        match &self.qpl {
            Some(QplFound { version, path }) => {
                writeln!(out, "  libqpl        {version}, {path} path")?
            }
            None => writeln!(out, "  libqpl        none")?,
        }
        let features =
            [("ublk", host.kernel.ublk), ("NBD", host.kernel.nbd), ("FUSE", host.kernel.fuse)];
        let words =
            features.map(|(name, feature): (&str, Feature)| format!("{name} {}", feature.text()));
        let release = host.kernel.release.as_deref().unwrap_or("?");
        writeln!(out, "  kernel        {release}: {}", words.join(", "))?;
        if let Some(vm) = &self.vm {
            let kvm = if vm.kvm { "KVM" } else { "no KVM" };
            writeln!(
                out,
                "  VM            QEMU {}, {kvm}, {}, {} of RAM, {} vCPUs, multifd {}",
                vm.qemu,
                vm.state,
                Size(vm.ram),
                vm.cpus,
                if vm.compressors.is_empty() { "unknown".into() } else { vm.compressors.join(" ") }
            )?;
        }
        let origin = match self.pages {
            Origin::Guest => "pages of the guest",
            Origin::BuiltIn => "built-in pages, not a guest's",
        };
        table(out, &format!("codecs on one core, {origin}, chunks of 512 KiB"), &self.codecs)?;
        if !self.codecs_again.is_empty() {
            table(out, "pages written to meanwhile, as differences", &self.codecs_again)?;
        }
        table(out, "single pages of 4 KiB", &self.codecs_single)
    }

    fn memory(&self, out: &mut String) -> std::fmt::Result {
        let memory = &self.memory;
        let worth = if memory.worth_while {
            "compressed memory"
        } else {
            "compressed memory: not worth while"
        };
        writeln!(out, "{worth}")?;
        for command in &memory.commands {
            writeln!(out, "  {command}")?;
        }
        for because in &memory.because {
            writeln!(out, "  {because}")?;
        }
        writeln!(
            out,
            "  expected: ratio {:.2}, CPU of a page {:.1} us written and {:.1} us read",
            memory.ratio, memory.page_cost[0], memory.page_cost[1]
        )
    }
}

impl Advice {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let how = if self.measured { "measured" } else { "not measured" };
        let data =
            self.data.map_or(String::new(), |data| format!(", {} of it not zeros", Size(data)));
        writeln!(
            out,
            "{:.0} Mbit/s ({how}), round trip {:.1} ms, {} of RAM{data}, {:.1} MB/s dirtied, \
             {:.1} of {:.0} cores to be had",
            self.link,
            self.rtt,
            Size(self.ram),
            self.dirty_rate as f64 / 1e6,
            self.free_cores,
            self.cores
        )?;
        match self.method {
            Some(method) => writeln!(out, "use {method}: {}", self.because)?,
            None => writeln!(out, "{}: see below for what would make it", self.because)?,
        }
        for command in &self.commands {
            writeln!(out, "    {command}")?;
        }
        writeln!(out, "forecasts, by a model (downtime of {} ms at most)", self.max_downtime)?;
        writeln!(
            out,
            "  {:<22} {:>10} {:>10} {:>12} {:>11} {:>11}",
            "method", "total", "downtime", "network", "CPU here", "CPU there"
        )?;
        for one in &self.alternatives {
            one.write(out)?;
        }
        for assumed in &self.assumed {
            writeln!(out, "  assumed: {assumed}")?;
        }
        for rule in self.rules.iter().filter(|rule| rule.applies) {
            writeln!(out, "  rule: {} ({})", rule.rule, rule.because)?;
            writeln!(out, "    measured: {}", rule.measured)?;
        }
        Ok(())
    }
}

impl Choice {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let seconds =
            |seconds: Option<f64>| or_dash(seconds.map(|seconds| format!("{seconds:.1} s")));
        let downtime = (self.verdict != Verdict::Never).then(|| format!("{} ms", self.downtime));
        writeln!(
            out,
            "  {:<22} {:>10} {:>10} {:>12} {:>11} {:>11}",
            self.method,
            seconds(self.total_time.map(|ms| ms as f64 / 1e3)),
            or_dash(downtime),
            or_dash(self.transferred.map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6))),
            seconds(self.cpu_source),
            seconds(self.cpu_destination)
        )?;
        match (&self.not_converging, self.verdict) {
            (Some(why), Verdict::Never) => writeln!(out, "    does not converge: {why}"),
            (Some(why), _) => {
                writeln!(out, "    may not converge (platen rehearse measures it): {why}")
            }
            (None, _) => Ok(()),
        }
    }
}

fn table(out: &mut String, title: &str, codecs: &[Codec]) -> std::fmt::Result {
    writeln!(out, "{title}")?;
    writeln!(out, "  {:<12} {:>7} {:>14} {:>14}", "codec", "ratio", "compress", "decompress")?;
    for one in codecs {
        let level = if one.level == 0 { String::new() } else { format!(" {}", one.level) };
        writeln!(
            out,
            "  {:<12} {:>7.2} {:>9.0} MB/s {:>9.0} MB/s",
            format!("{}{level}", one.codec),
            one.ratio,
            one.compress,
            one.decompress
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use advise::{Host, MemoryAdvice};

    fn advice() -> Advice {
        let ends = Choice {
            method: "platen",
            verdict: Verdict::Converges,
            total_time: Some(12_340),
            downtime: 120,
            transferred: Some(140_000_000),
            cpu_source: Some(8.0),
            cpu_destination: Some(4.0),
            not_converging: None,
        };
        let never = Choice {
            method: "QEMU, no compression",
            verdict: Verdict::Never,
            total_time: None,
            transferred: None,
            cpu_source: None,
            cpu_destination: None,
            not_converging: Some("the guest dirties 9.0 MB/s".into()),
            downtime: 900,
        };
        Advice {
            link: 1000.0,
            rtt: 0.2,
            measured: true,
            ram: 4 << 30,
            data: None,
            dirty_rate: 9_000_000,
            cores: 2.0,
            free_cores: 1.5,
            max_downtime: 300,
            assumed: vec!["none of the RAM is zeros".into()],
            alternatives: vec![ends, never],
            method: Some("platen"),
            commands: vec!["platen migrate --qmp unix:PATH --peer HOST:PORT".into()],
            because: "it is the fastest".into(),
            rules: Vec::new(),
        }
    }

    #[test]
    fn the_command_stands_first_and_assumptions_are_told() {
        let report = Report {
            status: "completed",
            host: Host::default(),
            vm: None,
            pages: Origin::BuiltIn,
            codecs: Vec::new(),
            codecs_again: Vec::new(),
            codecs_single: Vec::new(),
            usable_iaa: 0,
            qpl: None,
            first_touch: 0.5,
            advice: vec![advice()],
            memory: MemoryAdvice {
                worth_while: false,
                transport: None,
                codec: "zstd",
                size: 1 << 30,
                limit: 1 << 30,
                ratio: 2.3,
                page_cost: [13.5, 5.3],
                commands: Vec::new(),
                because: vec!["the kernel has neither".into()],
            },
        };
        let text = report.text();
        for words in [
            "1000 Mbit/s (measured), round trip 0.2 ms, 4G of RAM, 9.0 MB/s dirtied, \
             1.5 of 2 cores to be had\nuse platen: it is the fastest\n    platen migrate --qmp",
            "forecasts, by a model",
            "12.3 s     120 ms     140.0 MB       8.0 s       4.0 s",
            "does not converge: the guest dirties 9.0 MB/s",
            "assumed: none of the RAM is zeros",
            "built-in pages, not a guest's",
            "compressed memory: not worth while",
        ] {
            assert!(text.contains(words), "no '{words}' in:\n{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["advice"][0]["alternatives"][0]["verdict"], "converges");
        assert!(json["advice"][0].get("data").is_none() && json.get("vm").is_none());
    }
}
