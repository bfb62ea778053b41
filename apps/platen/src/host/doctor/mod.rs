//! `platen doctor`: checks this host before its first migration, and prints the remedies.
//!
//! | module | checks |
//! |---|---|
//! | `software` | QEMU, libvirt, userfaultfd |
//! | `qemu_conf` | libvirt's settings |
//! | `here` | users, certificate, the service, its doors and ports |
//! | `peers` | the other hosts: reached, authenticated, version, clock, MTU |

mod here;
mod peers;
mod qemu_conf;
mod software;

use super::settings::{self, Settings};
use super::DoctorArgs;
use crate::say::{printable, show};
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// Migrations work, as far as this check can tell.
    Ok,
    /// Migrations work, but some kinds of them may fail.
    Warn,
    /// Migrations fail.
    Fail,
}

/// One result.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Finding {
    /// Name of the check.
    pub(super) check: String,
    /// `ok`; `warn`: some kinds of migrations may fail; `fail`: migrations fail.
    pub(super) verdict: Verdict,
    /// The finding.
    pub(super) found: String,
    /// The remedy.
    pub(super) advice: Option<String>,
}

impl Finding {
    fn new(check: &str, verdict: Verdict, found: impl Into<String>, advice: Option<&str>) -> Self {
        Self {
            check: check.into(),
            verdict,
            found: found.into(),
            advice: advice.map(str::to_owned),
        }
    }

    fn ok(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Ok, found, None)
    }

    fn warn(check: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(check, Verdict::Warn, found, Some(advice))
    }

    fn fail(check: &str, found: impl Into<String>, advice: &str) -> Self {
        Self::new(check, Verdict::Fail, found, Some(advice))
    }
}

pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = software::check();
    findings.extend(configured(args));
    show(&if args.json { json(&findings)? } else { described(&findings) })?;
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the checks that need the configuration.
fn configured(args: &DoctorArgs) -> Vec<Finding> {
    const CHECK: &str = "configuration";
    let path = args.service.config.display();
    let settings = match settings::read(&args.service.config) {
        Ok(_) => Settings::new(&args.service),
        Err(error) => Err(error),
    };
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => {
            let advice = "write it as docs/doors.md says; `platen config check` checks it";
            return vec![Finding::fail(CHECK, format!("{error:#}"), advice)];
        }
    };
    let hosts = settings.config.host.len();
    let found = format!("{path}: this is '{}', one of {hosts} hosts", settings.me().name);
    let mut findings = vec![Finding::ok(CHECK, found)];
    findings.extend(qemu_conf::check(&args.qemu_conf, &settings));
    findings.extend(here::check(&args.service, &settings));
    findings.extend(peers::check(&settings));
    findings
}

fn json(findings: &[Finding]) -> anyhow::Result<String> {
    let mut out = String::new();
    for finding in findings {
        writeln!(out, "{}", serde_json::to_string(finding)?)?;
    }
    Ok(out)
}

fn described(findings: &[Finding]) -> String {
    let mut out = String::new();
    for Finding { check, verdict, found, advice } in findings {
        let verdict = match verdict {
            Verdict::Ok => "ok  ",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        let _ = writeln!(out, "{verdict}  {check}: {}", printable(found).replace('\n', "\n      "));
        if let Some(advice) = advice {
            let _ = writeln!(out, "      -> {}", printable(advice));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::ServiceArgs;
    use super::*;

    #[test]
    fn each_line_says_what_to_do() {
        let text = described(&[
            Finding::ok("qemu", "7.2"),
            Finding::fail("peer b", "a\u{1b}b", "start it"),
        ]);
        assert_eq!(text, "ok    qemu: 7.2\nFAIL  peer b: a\\u{1b}b\n      -> start it\n");
        let text = json(&[Finding::warn("mtu", "1", "2")]).unwrap();
        assert_eq!(
            text,
            "{\"check\":\"mtu\",\"verdict\":\"warn\",\"found\":\"1\",\"advice\":\"2\"}\n"
        );
    }

    #[test]
    fn a_configuration_that_cannot_be_used_is_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("platen.toml");
        let args = || DoctorArgs {
            service: ServiceArgs { config: config.clone(), name: Some("b".into()), run_dir: None },
            qemu_conf: folder.path().join("none"),
            json: false,
        };
        for text in
            ["", "speed = 1", "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"1-9\"\n"]
        {
            std::fs::write(&config, text).unwrap();
            let findings = configured(&args());
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!(
                (&*findings[0].check, findings[0].verdict),
                ("configuration", Verdict::Fail)
            );
        }
    }
}
