//! Generates `docs/reference.md` from the definitions of options, settings, reports and metrics.

mod command;
mod saved;
mod structs;

use crate::device;
use clap::CommandFactory;
use std::fmt::Write;
use std::path::Path;

/// The command that rewrites the file.
const REWRITE: &str = "UPDATE_REFERENCE=1 cargo test -p platen --lib reference";

/// Sources of the structs that are JSON or TOML.
const REPORT: &[&str] = &[include_str!("../report.rs"), include_str!("../auto.rs")];
const STATUS: &[&str] =
    &[include_str!("../device/status/mod.rs"), include_str!("../device/footprint.rs")];
const POLICY: &[&str] = &[include_str!("../../../../memory/policy/src/settings.rs")];
const CONFIG: &[&str] = &[include_str!("../../../../migrate/host/src/config.rs")];
const HOST: &[&str] =
    &[include_str!("../host/status.rs"), include_str!("../../../../migrate/host/src/record.rs")];
const REHEARSAL: &[&str] = &[include_str!("../rehearse/report.rs")];
const EVACUATION: &[&str] = &[include_str!("../evacuate/report.rs")];
const ADVICE: &[&str] = &[
    include_str!("../advise/report.rs"),
    include_str!("../../../../migrate/advise/src/compressed_memory.rs"),
    include_str!("../../../../migrate/advise/src/rules.rs"),
    include_str!("../../../../migrate/advise/src/host/mod.rs"),
    include_str!("../../../../migrate/advise/src/host/network.rs"),
    include_str!("../../../../migrate/advise/src/host/accelerators.rs"),
    include_str!("../../../../migrate/advise/src/host/kernel.rs"),
    include_str!("../../../../migrate/advise/src/vm/look.rs"),
];
const DOCTOR: &[&str] = &[include_str!("../host/doctor/mod.rs")];
const CHECK: &[&str] = &[include_str!("../../../../memory/swap/src/check/mod.rs")];

#[test]
fn the_reference_matches_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference.md");
    let made = reference();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = made.lines().zip(there.lines()).find(|(made, there)| made != there);
    assert!(made == there, "docs/reference.md is not current ({differs:?}); run: {REWRITE}");
}

fn reference() -> String {
    let mut text = format!(
        "# Reference\n\n\
         Options, settings, report fields and metrics of platen, generated from the code. After a change \
         there, `{REWRITE}` rewrites this file.\n\n\
         `SIZE` is a number of bytes, or a number with the unit K, M, G or T (powers of 1024). The exit \
         status of every command is 0 on success only, except for `platen qat sim`, whose status is that \
         of the command it runs.\n"
    );
    command::describe(&mut text, &crate::Cli::command());
    settings(&mut text);
    configuration(&mut text);
    reports(&mut text);
    metrics(&mut text);
    text
}

fn settings(text: &mut String) {
    text.push_str(
        "\n## Settings of the policy\n\n\
         `platen device serve --policy FILE` reads a TOML file with one section, `[policy]`. A key that \
         is left out has its default; an unknown key is an error.\n\n\
         | Key | Type | Default | Meaning |\n|---|---|---|---|\n",
    );
    let defaults = serde_json::to_value(policy::Settings::default()).unwrap();
    for field in structs::fields(POLICY, "Settings") {
        let pointer = format!("/{}", field.key.replace('.', "/"));
        let default = match defaults.pointer(&pointer).unwrap() {
            serde_json::Value::Null => "none".to_owned(),
            serde_json::Value::Object(_) => continue,
            value => format!("`{value}`"),
        };
        let kind = field.kind.trim_end_matches(" or null");
        writeln!(text, "| `{}` | {kind} | {default} | {} |", field.key, field.meaning).unwrap();
    }
}

fn configuration(text: &mut String) {
    text.push_str(
        "\n## Configuration of `platen host` (`/etc/platen/platen.toml`)\n\n\
         The same TOML file on every host. A key that is left out has its default; an unknown key is \
         an error. `platen config check` checks a file.\n\n\
         | Key | Type | Default | Meaning |\n|---|---|---|---|\n",
    );
    let defaults = serde_json::to_value(::host::Config::default()).unwrap();
    for field in structs::fields(CONFIG, "Config") {
        let of_host = field.key.starts_with("host[]");
        let default = match defaults.get(&field.key) {
            _ if field.key == "host" => continue,
            None if of_host && field.kind.ends_with("or null") => "none".to_owned(),
            None => "required".to_owned(),
            Some(serde_json::Value::Null) => "none".to_owned(),
            Some(value) => format!("`{value}`"),
        };
        let kind = field.kind.trim_end_matches(" or null");
        let key = field.key.replace("host[]", "[[host]]");
        writeln!(text, "| `{key}` | {kind} | {default} | {} |", field.meaning).unwrap();
    }
}

fn reports(text: &mut String) {
    let status = device::example_status();
    let metrics = device::metrics_text(&status);
    let helps = helps(&metrics);
    for (title, sources, name) in [
        ("Report of a migration (`--json` of `migrate`, `relay` and `receive`)", REPORT, "Report"),
        ("Report of an evacuation (`platen evacuate --json`)", EVACUATION, "Evacuation"),
        ("Report of a rehearsal (`platen rehearse --json`)", REHEARSAL, "Report"),
        ("Report of advice (`platen advise --json`)", ADVICE, "Report"),
        (
            "Status of the service (`platen host status --json`, `platen list --json`)",
            HOST,
            "HostStatus",
        ),
        ("Event of the service (`platen events --json`), one line each", HOST, "Event"),
        ("Result of a check (`platen doctor --json`), one line each", DOCTOR, "Finding"),
        ("Status of a device (`platen device stat --json`)", STATUS, "Status"),
        ("Precaution of a server of swap (`platen device check --json`)", CHECK, "Item"),
    ] {
        begin_report(text, title);
        for mut field in structs::fields(sources, name) {
            let last = field.key.rsplit('.').next().unwrap();
            if field.meaning.is_empty() {
                let found = helps.iter().find(|help| help.is_of(last));
                field.meaning = found.map_or_else(String::new, |help| format!("{}.", help.text));
            }
            assert!(!field.meaning.is_empty(), "{} of {name} has no comment", field.key);
            writeln!(text, "| `{}` | {} | {} |", field.key, field.kind, field.meaning).unwrap();
            if field.kind.starts_with("object") && last == "policy" {
                for (name, _, meaning, _) in status.policy.iter().flat_map(|it| it.fields()) {
                    let key = &field.key;
                    writeln!(text, "| `{key}.{name}` | integer | {meaning}. |").unwrap();
                }
            }
        }
    }
    for (title, keys) in [
        ("Report of a save (`platen save --json`)", saved::SAVE),
        ("Report of a restore (`--json` of `restore` and `virsh-restore`)", saved::RESTORE),
    ] {
        begin_report(text, title);
        for (key, kind, meaning) in keys {
            writeln!(text, "| `{key}` | {kind} | {meaning} |").unwrap();
        }
    }
}

fn begin_report(text: &mut String, title: &str) {
    writeln!(text, "\n## {title}\n\n| Key | Type | Meaning |\n|---|---|---|").unwrap();
}

fn metrics(text: &mut String) {
    text.push_str(
        "\n## Metrics of the service (`metrics` in `/etc/platen/platen.toml`)\n\n\
         `role` is `source` or `destination`, `status` an outcome. `packaging/grafana.json` is a \
         dashboard of them.\n\n\
         | Metric | Type | Meaning |\n|---|---|---|\n",
    );
    for help in helps(&crate::host::metrics::example()) {
        writeln!(text, "| `{}` | {} | {}. |", help.metric, help.kind, help.text).unwrap();
    }
    text.push_str(
        "\n## Metrics (`platen device serve --prometheus`)\n\n\
         Every sample has the labels `device` and `codec`.\n\n\
         | Metric | Type | Meaning |\n|---|---|---|\n",
    );
    let metrics = device::metrics_text(&device::example_status());
    for help in helps(&metrics) {
        writeln!(text, "| `{}` | {} | {}. |", help.metric, help.kind, help.text).unwrap();
    }
}

/// `# HELP` and `# TYPE` of one metric.
struct Help<'a> {
    metric: &'a str,
    kind: &'a str,
    text: &'a str,
}

impl Help<'_> {
    /// Whether this is the metric of a status field of that name.
    fn is_of(&self, field: &str) -> bool {
        let name = self.metric.trim_start_matches("platen_device_");
        let name = name.trim_start_matches("accelerator_");
        name == field || name.strip_suffix("_total") == Some(field)
    }
}

fn helps(metrics: &str) -> Vec<Help<'_>> {
    let mut helps = Vec::new();
    let mut lines = metrics.lines();
    while let Some(line) = lines.next() {
        let Some((metric, text)) =
            line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let kind = lines.next().and_then(|line| line.rsplit(' ').next()).unwrap();
        helps.push(Help { metric, kind, text });
    }
    helps
}
