//! The metrics of the service, in Prometheus's text format. Labels have values of enumerations
//! only, so that the number of samples is fixed.

use super::activity::{Activity, OfRole};
use super::switchboard::Carriers;
use crate::device::endpoint::Endpoint;
use crate::device::metrics::serve_text;
use crate::say::say;
use anyhow::Context;
use host::{MetricsAddress, Record, Role, Status, What};
use relay::{Listening, UnixAddress};
use std::fmt::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// The endpoint. Dropping this ends it.
pub(super) struct Metrics {
    _endpoint: Endpoint,
    /// Removes the socket.
    _listening: Option<Listening>,
}

/// Serves the metrics at `address`, if there is one.
pub(super) fn start(
    address: Option<&str>,
    activity: &Arc<Activity>,
    carriers: &Arc<Carriers>,
) -> anyhow::Result<Option<Metrics>> {
    let Some(address) = address else { return Ok(None) };
    let parsed = MetricsAddress::parse(address).map_err(anyhow::Error::msg).context("metrics")?;
    let (activity, carriers) = (activity.clone(), carriers.clone());
    let text = move || text(&activity, &carriers.registry.running());
    let (endpoint, listening) = match parsed {
        MetricsAddress::Tcp(address) => {
            let listener = TcpListener::bind(address)
                .with_context(|| format!("metrics: cannot listen on {address}"))?;
            (serve_text(listener, text)?, None)
        }
        MetricsAddress::Unix(path) => {
            let listening = UnixAddress::from(path.clone()).listen().context("metrics")?;
            // The group of the service may connect, too: a scraper is another user.
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o660))
                .with_context(|| format!("metrics: {}", path.display()))?;
            (serve_text(listening.listener.try_clone()?, text)?, Some(listening))
        }
    };
    say(&format!("metrics on {address}"));
    Ok(Some(Metrics { _endpoint: endpoint, _listening: listening }))
}

/// A metric under construction.
struct Family<'a>(&'a mut String, &'static str);

impl<'a> Family<'a> {
    fn new(text: &'a mut String, name: &'static str, kind: &str, help: &str) -> Self {
        writeln!(text, "# HELP platen_host_{name} {help}\n# TYPE platen_host_{name} {kind}")
            .expect("a string takes all");
        Self(text, name)
    }

    fn sample(&mut self, labels: &str, value: impl std::fmt::Display) {
        writeln!(self.0, "platen_host_{}{labels} {value}", self.1).expect("a string takes all");
    }
}

/// The counters in Prometheus's text format.
pub(super) fn text(activity: &Activity, running: &[Record]) -> String {
    let mut text = String::new();
    let out = &mut text;
    let version = concat!("{version=\"", env!("CARGO_PKG_VERSION"), "\"}");
    Family::new(out, "info", "gauge", "Version of the service; the value is 1").sample(version, 1);
    Family::new(out, "uptime_seconds", "gauge", "Time since the start of the service, seconds")
        .sample("", activity.since.elapsed().as_secs());
    let single: [(&AtomicU64, _, _, _); 8] = [
        (&activity.doors, "doors_open", "gauge", "Doors that are open"),
        (&activity.doors_configured, "doors", "gauge", "Doors of the configuration"),
        (
            &activity.refused,
            "connections_refused_total",
            "counter",
            "Connections to a door that were reset because of their user, or because too many waited",
        ),
        (
            &activity.strangers,
            "strangers_total",
            "counter",
            "Connections to a door that were no migration",
        ),
        (
            &activity.links_refused,
            "links_refused_total",
            "counter",
            "Connections of other hosts that were turned away",
        ),
        (
            &activity.reloads,
            "reloads_total",
            "counter",
            "Reloads of the configuration that took effect",
        ),
        (
            &activity.reloads_failed,
            "reloads_failed_total",
            "counter",
            "Reloads of the configuration that were refused",
        ),
        (
            &activity.certificate_end,
            "certificate_end_seconds",
            "gauge",
            "End of this host's certificate, seconds since 1970; 0 if it is not known",
        ),
    ];
    for (counter, name, kind, help) in single {
        Family::new(out, name, kind, help).sample("", counter.load(Ordering::Relaxed));
    }
    of_roles(out, activity, running);
    text
}

fn of_roles(out: &mut String, activity: &Activity, running: &[Record]) {
    const ROLES: [Role; 2] = [Role::Source, Role::Destination];
    let label = |role: Role| format!("{{role=\"{}\"}}", role.name());
    let mut family =
        Family::new(out, "migrations_running", "gauge", "Migrations that run, by this host's role");
    for role in ROLES {
        let is_one = |record: &&Record| record.role == role && record.what == What::Vm;
        let count = running.iter().filter(is_one).count();
        family.sample(&label(role), count);
    }
    type Counter = fn(&OfRole) -> &AtomicU64;
    let counters: [(Counter, _, _); 5] = [
        (
            |of| &of.begun,
            "migrations_begun_total",
            "Migrations that have begun, by this host's role",
        ),
        (
            |of| &of.disks_begun,
            "disks_begun_total",
            "NBD connections of disks that have begun, by this host's role",
        ),
        (
            |of| &of.disks_failed,
            "disks_failed_total",
            "NBD connections of disks that have failed, by this host's role",
        ),
        (
            |of| &of.plain,
            "stream_bytes_total",
            "Bytes of QEMU's migration streams and of disks, by this host's role",
        ),
        (
            |of| &of.transferred,
            "network_bytes_total",
            "Bytes of migrations and of disks on the network, by this host's role",
        ),
    ];
    for (counter, name, help) in counters {
        let mut family = Family::new(out, name, "counter", help);
        for role in ROLES {
            family.sample(&label(role), counter(activity.of(role)).load(Ordering::Relaxed));
        }
    }
    let help = "Migrations that have ended, by this host's role and their outcome";
    let mut family = Family::new(out, "migrations_ended_total", "counter", help);
    for role in ROLES {
        for status in Status::ALL {
            let labels = format!("{{role=\"{}\",status=\"{}\"}}", role.name(), status.name());
            family.sample(&labels, activity.of(role).ended(status));
        }
    }
}

/// The metrics of a service without migrations.
#[cfg(test)]
pub(crate) fn example() -> String {
    text(&Activity::new(), &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Phase, Watcher};
    use serde_json::Value;
    use std::collections::{BTreeMap, BTreeSet};

    /// Reads the text format 0.0.4 strictly: each sample after the help and the type of its metric,
    /// no metric and no sample twice. Returns the samples.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let is_name = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        assert!(text.ends_with('\n'));
        let (mut samples, mut families) = (BTreeMap::new(), BTreeSet::new());
        let mut current = String::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                assert!(is_name(name) && !help.is_empty(), "{line}");
                assert!(families.insert(name.to_owned()), "{name} twice");
                let kind = lines.next().unwrap().strip_prefix("# TYPE ").unwrap();
                let (typed, kind) = kind.split_once(' ').unwrap();
                assert_eq!(typed, name);
                assert!(["counter", "gauge"].contains(&kind), "{kind}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
                current = name.to_owned();
                continue;
            }
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            assert_eq!(name, current, "a sample of another metric");
            let labels = labels.strip_suffix('}').expect("labels end");
            for label in labels.split(',').filter(|label| !label.is_empty()) {
                let (key, value) = label.split_once('=').unwrap();
                let value = value.strip_prefix('"').and_then(|it| it.strip_suffix('"')).unwrap();
                assert!(is_name(key) && !value.contains(['"', '\\', '\n']), "{line}");
            }
            let value: f64 = value.parse().unwrap();
            assert!(samples.insert(series.to_owned(), value).is_none(), "{series} twice");
        }
        samples
    }

    #[test]
    fn the_metrics_are_prometheus_s_format_and_their_number_is_fixed() {
        let empty = parse(&example());
        assert_eq!(empty.len(), 2 + 8 + 6 * 2 + 2 * 4);
        let activity = Activity::new();
        let opening = |nth: u64| Record {
            id: nth.to_string(),
            peer: format!("peer \"{nth}\"\n"),
            role: Role::Destination,
            ..Record::default()
        };
        for nth in 0..50 {
            let begin = opening(nth);
            activity.changed(None, &begin);
            let status = Some(Status::Failed);
            let end =
                Record { plain: 3, transferred: 2, phase: Phase::Ended, status, ..begin.clone() };
            activity.changed(Some(&begin), &end);
        }
        let samples = parse(&text(&activity, &[opening(51)]));
        let names = |all: &BTreeMap<String, f64>| all.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&samples), names(&empty), "no label has a value of a peer");
        let value = |name: &str| samples[&format!("platen_host_{name}")];
        assert_eq!(value("migrations_ended_total{role=\"destination\",status=\"failed\"}"), 50.0);
        assert_eq!(value("stream_bytes_total{role=\"destination\"}"), 150.0);
        assert_eq!(value("network_bytes_total{role=\"destination\"}"), 100.0);
        assert_eq!(value("migrations_running{role=\"destination\"}"), 1.0);
        assert_eq!(value("migrations_running{role=\"source\"}"), 0.0);
    }

    /// The words of a query that look like our metrics.
    fn metrics_in(query: &str) -> impl Iterator<Item = &str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        query.split(move |c| !is_part(c)).filter(|word| word.starts_with("platen_"))
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_exist_and_for_all_that_count_migrations() {
        let dashboard = include_str!("../../../../packaging/grafana.json");
        let dashboard: Value = serde_json::from_str(dashboard).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let queries: Vec<&str> = panels
            .iter()
            .flat_map(|panel| panel["targets"].as_array().into_iter().flatten())
            .map(|target| target["expr"].as_str().expect("each target has a query"))
            .collect();
        assert!(panels.len() >= 8 && queries.len() >= panels.len(), "{queries:?}");
        let example = example();
        let known: BTreeSet<&str> = example
            .lines()
            .filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next())
            .collect();
        let asked: BTreeSet<&str> = queries.iter().copied().flat_map(metrics_in).collect();
        let unknown: Vec<_> = asked.difference(&known).collect();
        assert!(unknown.is_empty(), "the dashboard asks for {unknown:?}");
        let missing: Vec<_> = known.difference(&asked).collect();
        assert!(missing.is_empty(), "the dashboard has no panel for {missing:?}");
        // The values of the labels are those that exist.
        for query in queries {
            for status in query.split("status=\"").skip(1) {
                let status = status.split('"').next().unwrap();
                assert!(Status::ALL.iter().any(|known| known.name() == status), "{query}");
            }
        }
    }
}
