//! Compares a new configuration with that of a running service.

use crate::config::Config;
use serde_json::Value;

/// Keys that take effect at the start of a service only: its own sockets, and the folder in which
/// its carriers are found again.
const AT_START: [&str; 3] = ["port", "run_dir", "metrics"];

/// The parts of a new configuration that a running service adopts.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The new configuration, with the old values of the keys that need a restart.
    pub config: Config,
    /// Keys that have changed and take effect, and `host NAME` for each host that was added,
    /// removed or changed.
    pub taken: Vec<String>,
    /// Keys whose new value needs a restart of the service.
    pub at_restart: Vec<String>,
    /// Whether `platen host doors on`, and then a restart of libvirtd, have to follow.
    pub doors: bool,
}

impl Change {
    /// Compares two configurations of the host `me`. Both contain that host.
    pub fn between(old: &Config, new: Config, me: &str) -> Self {
        let (mut config, mut taken, mut at_restart) = (new, Vec::new(), Vec::new());
        let (before, after) = (fields(old), fields(&config));
        for (key, value) in &after {
            if key == "host" || before.get(key) == Some(value) {
                continue;
            }
            let needs_restart = AT_START.contains(&key.as_str());
            if needs_restart { &mut at_restart } else { &mut taken }.push(key.clone());
        }
        config.port = old.port;
        config.run_dir.clone_from(&old.run_dir);
        config.metrics.clone_from(&old.metrics);
        let of = |config: &Config, name: &str| {
            config.host.iter().find(|host| host.name == name).cloned()
        };
        let mut doors = false;
        for host in &mut config.host {
            let before = of(old, &host.name);
            if host.name == me {
                if let Some(before) = &before {
                    doors = (before.door, &before.ports) != (host.door, &host.ports);
                    if before.listen != host.listen {
                        at_restart.push(format!("listen of host {me}"));
                        host.listen = before.listen;
                    }
                }
            }
            if before.as_ref() != Some(host) {
                taken.push(format!("host {}", host.name));
            }
        }
        let gone = old.host.iter().filter(|host| of(&config, &host.name).is_none());
        taken.extend(gone.map(|host| format!("host {}", host.name)));
        Self { config, taken, at_restart, doors }
    }

    /// The change in words.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if !self.taken.is_empty() {
            parts.push(format!("changed for new migrations: {}", self.taken.join(", ")));
        }
        if !self.at_restart.is_empty() {
            parts.push(format!(
                "changed from the next start of the service on (`systemctl restart platen` ends no \
                 migration): {}",
                self.at_restart.join(", ")
            ));
        }
        let mut text = match parts.as_slice() {
            [] => "nothing in it has changed".to_owned(),
            parts => parts.join("; "),
        };
        if self.doors {
            text.push_str(
                "; the door or the ports of this host have changed: run `platen host doors on`, then \
                 restart libvirtd",
            );
        }
        text
    }
}

fn fields(config: &Config) -> serde_json::Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(head: &str, hosts: &[(&str, u8)]) -> Config {
        let hosts: String = hosts
            .iter()
            .map(|(name, nth)| {
                format!(
                    "[[host]]\nname = \"{name}\"\ndoor = \"127.80.0.{nth}\"\nports = \"{nth}00-{nth}09\"\n"
                )
            })
            .collect();
        Config::parse(&format!("{head}\n{hosts}")).unwrap()
    }

    #[test]
    fn each_change_is_named_and_what_needs_a_restart_stays() {
        let old = config("", &[("a", 1), ("b", 2), ("c", 3)]);
        let same = Change::between(&old, old.clone(), "a");
        assert_eq!((&same.config, same.doors), (&old, false));
        assert_eq!(same.describe(), "nothing in it has changed");

        let head = "port = 4555\nrun_dir = \"/run/other\"\nmetrics = \"127.0.0.1:9464\"\n\
                    links = 2\ncodec = \"zstd\"\nlevel = 3";
        let new = config(head, &[("a", 1), ("b", 4), ("d", 5)]);
        let change = Change::between(&old, new, "a");
        assert_eq!(change.taken, ["codec", "level", "links", "host b", "host d", "host c"]);
        assert_eq!(change.at_restart, ["metrics", "port", "run_dir"]);
        let now = &change.config;
        assert_eq!((now.port, &now.run_dir, &now.metrics), (4444, &old.run_dir, &None));
        assert_eq!((now.links, now.level, now.host.len()), (2, Some(3), 3));
        assert!(change.describe().contains("restart platen"), "{}", change.describe());
        let later =
            Change::between(&old, config("port = 4555", &[("a", 1), ("b", 2), ("c", 3)]), "a");
        let said = later.describe();
        assert!(
            said.starts_with("changed from the next start") && said.ends_with(": port"),
            "{said}"
        );
    }

    #[test]
    fn this_host_s_own_listening_address_and_door_are_told_apart() {
        let old = config("", &[("a", 1), ("b", 2)]);
        let mut new = old.clone();
        new.host[0].listen = Some("127.0.0.1".parse().unwrap());
        let change = Change::between(&old, new.clone(), "a");
        assert_eq!(change.at_restart, ["listen of host a"]);
        assert_eq!((change.taken.len(), change.config.host[0].listen), (0, None));
        // Another host's address is its own affair.
        assert_eq!(Change::between(&old, new, "b").taken, ["host a"]);
        let mut new = old.clone();
        new.host[0].door = "127.80.0.9".parse().unwrap();
        let change = Change::between(&old, new, "a");
        assert!(change.doors && change.describe().contains("doors on"), "{change:?}");
    }
}
