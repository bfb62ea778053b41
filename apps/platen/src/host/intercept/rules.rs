//! The texts of the rules, in nft's syntax.

use super::redirect::Redirect;
use crate::host::settings::Settings;
use anyhow::{bail, Context};
use host::{HostEntry, Policy, MARK};
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};

/// Creates the table and its chains if they are missing, and removes all rules: the beginning of
/// each transaction. The table is never deleted. With the last chain of type nat the kernel removes
/// its hooks, and then translates no packet of running connections: a VM whose source has sent
/// everything, and waits for no answer, would be lost.
const EMPTY: &str = "add table ip platen\n\
    add chain ip platen intercept { type nat hook output priority -100; policy accept; }\n\
    add chain ip platen when_stopped\n\
    flush table ip platen\n";
/// Redirects no connection, and lets the kernel track the running ones.
const HOLD: &str = "add rule ip platen intercept ct state new accept\n";
/// The chain that refuses connections.
const REFUSING: &str =
    "add chain ip platen stopped { type filter hook output priority 0; policy accept; }\n";
/// From now on only the rules of `when_stopped` are in force. Without the service any process may
/// listen at the ports to which the other rules redirect.
const STOP: &str = "flush chain ip platen intercept\n\
    flush chain ip platen stopped\n\
    add rule ip platen stopped jump when_stopped\n";

/// The rules of a configuration.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// The hosts whose addresses are known.
    pub(super) known: Vec<String>,
    /// The other hosts, and why.
    unknown: Vec<(HostEntry, anyhow::Error)>,
    redirects: String,
    /// With `intercept_stopped = "refuse"`: the rules of `when_stopped`.
    refusals: String,
    /// Those of them for hosts whose addresses are not known. These are in force all the time:
    /// nothing can redirect such a host's migrations.
    refusals_of_unknown: String,
}

impl Rules {
    /// The rules for each host whose addresses `look_up` finds.
    pub(super) fn new(
        settings: &Settings,
        look_up: impl Fn(&HostEntry) -> anyhow::Result<Vec<Ipv4Addr>>,
    ) -> Self {
        let users: Vec<_> = settings.qemu_users().iter().map(u32::to_string).collect();
        let users = format!("meta mark != {MARK:#x} meta skuid {{ {} }}", users.join(", "));
        let refuses = settings.config.intercept_stopped == Policy::Refuse;
        // Where nothing has tracked connections before, a packet of a running one counts as new.
        let begins = "tcp flags & (fin | syn | rst | ack) == syn";
        let reject = format!("{begins} ct state new counter reject with tcp reset\n");
        let (mut rules, mut all) = (Self::default(), Vec::new());
        for (host, ports) in settings.intercepted() {
            let addresses: Vec<_> = match look_up(host) {
                Ok(found) => found.iter().map(Ipv4Addr::to_string).collect(),
                Err(error) => {
                    rules.unknown.push((host.clone(), error));
                    continue;
                }
            };
            let doors = ports.0.clone().zip(host.ports.0.clone());
            let doors: Vec<_> = doors.map(|(port, door)| format!("{port} : {door}")).collect();
            let these = format!(
                "{users} ip daddr {{ {} }} tcp dport {}-{}",
                addresses.join(", "),
                ports.0.start(),
                ports.0.end()
            );
            rules.redirects.push_str(&format!(
                "add rule ip platen intercept {these} {begins} counter dnat to {} : tcp dport map \
                 {{ {} }}\n",
                host.door,
                doors.join(", ")
            ));
            if refuses {
                rules
                    .refusals
                    .push_str(&format!("add rule ip platen when_stopped {these} {reject}"));
            }
            rules.known.push(host.name.clone());
            all.extend(addresses);
        }
        let elsewhere = match all.is_empty() {
            true => String::new(),
            false => format!(" ip daddr != {{ {} }}", all.join(", ")),
        };
        for (host, _) in rules.unknown.iter().filter(|_| refuses) {
            let ports = host.intercept.as_ref().expect("it is intercepted");
            let (first, last) = (ports.0.start(), ports.0.end());
            let these =
                format!("{users} oifname != \"lo\"{elsewhere} tcp dport {first}-{last} {reject}");
            rules.refusals.push_str(&format!("add rule ip platen when_stopped {these}"));
            rules.refusals_of_unknown.push_str(&format!("add rule ip platen stopped {these}"));
        }
        rules
    }

    /// Redirects connections to the doors.
    pub(super) fn on(&self) -> String {
        let Self { redirects, refusals, refusals_of_unknown: unknown, .. } = self;
        let refusing = if unknown.is_empty() { "" } else { REFUSING };
        format!("{EMPTY}{redirects}{refusals}{refusing}{unknown}{HOLD}")
    }

    /// The text that refuses migrations where [`Rules::on`] could not be installed; `None` if they
    /// are not to be refused, or if there is a table: it stays as it is.
    pub(super) fn instead_of_on(&self, listed: Option<&str>) -> Option<String> {
        if listed.is_some() {
            return None;
        }
        stopped(None, Some(self))
    }

    /// The reason not to install the rules: a host whose address is not found now has rules, which
    /// would be removed.
    pub(super) fn would_lose(&self, listed: &str) -> Option<String> {
        let lost = self.unknown.iter().find(|(host, _)| is_led(listed, host));
        lost.map(|(_, error)| format!("{error:#}. The rules stay as they are"))
    }

    /// The hosts, by their names, whose redirects in the listed table are missing, or are not
    /// these.
    pub(super) fn missing_in(&self, listed: &str) -> Vec<String> {
        let there = Redirect::all(listed);
        let wanted = self.known.iter().zip(Redirect::all(&self.redirects));
        let missing = wanted.filter(|(_, redirect)| !there.contains(redirect));
        // Without its addresses, only the door of a host can be compared.
        let unknown = self.unknown.iter().filter(|(host, _)| !is_led(listed, host));
        let missing = missing.map(|(name, _)| name).chain(unknown.map(|(host, _)| &host.name));
        missing.cloned().collect()
    }

    /// The hosts to which nothing is redirected.
    pub(super) fn why_not_all(&self) -> Option<String> {
        let fate = match self.refusals_of_unknown.is_empty() {
            true => "its migrations go past platen, in the clear",
            false => "connections to its ports are refused at every unknown address",
        };
        let why = |(_, error): &(HostEntry, anyhow::Error)| format!("{error:#}: {fate}");
        let why: Vec<_> = self.unknown.iter().map(why).collect();
        let again = "When that is mended: platen host intercept on";
        (!why.is_empty()).then(|| format!("{}. {again}", why.join("; ")))
    }
}

/// Removes the rules.
pub(super) fn off() -> String {
    format!("{EMPTY}{HOLD}")
}

/// The text that refuses migrations while no service runs: by the rules that the listed table has
/// for that, or without a table by those of the configuration; `None` if there are none. A table
/// without such rules is one of `forward`, or of `off`, which a user has ordered.
pub(super) fn stopped(listed: Option<&str>, configured: Option<&Rules>) -> Option<String> {
    if let Some(listed) = listed {
        return refuses(listed).then(|| format!("{REFUSING}{STOP}{HOLD}"));
    }
    let Rules { refusals, .. } = configured?;
    (!refusals.is_empty()).then(|| format!("{EMPTY}{refusals}{REFUSING}{STOP}{HOLD}"))
}

/// Whether the listed table has rules that refuse migrations.
pub(super) fn refuses(listed: &str) -> bool {
    listed.contains("reject")
}

/// Whether a rule of the listed table redirects to the door of this host.
fn is_led(listed: &str, host: &HostEntry) -> bool {
    let door = host.door.to_string();
    listed.split([' ', ':']).any(|word| word == door)
}

/// The IPv4 addresses of a host.
pub(super) fn addresses(host: &HostEntry) -> anyhow::Result<Vec<Ipv4Addr>> {
    let name = host.address();
    let found = (name, 0).to_socket_addrs().with_context(|| {
        format!("the address '{name}' of host '{}' cannot be looked up", host.name)
    })?;
    let mut found: Vec<_> = found
        .filter_map(|address| match address {
            SocketAddr::V4(address) => Some(*address.ip()),
            SocketAddr::V6(_) => None,
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() {
        bail!(
            "'{name}' of host '{}' has no IPv4 address, and no other connection can be led to a \
             door: take `intercept` out, or give an `address`",
            host.name
        );
    }
    Ok(found)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::missing;
    use super::super::tests::settings;
    use super::*;

    fn refusing(of_b: &str) -> Settings {
        let mut settings = settings(of_b);
        settings.config.intercept_stopped = Policy::Refuse;
        settings
    }

    /// Settings of three hosts, and what is found of them if the name of `c` is not known.
    pub(in super::super) fn without_c(settings: impl Fn(&str) -> Settings) -> Rules {
        let of_b = "intercept = \"60000-60001\"\n[[host]]\nname = \"c\"\ndoor = \"127.80.0.3\"\n\
                    ports = \"120-129\"\nintercept = \"60100-60101\"\n";
        Rules::new(&settings(of_b), |host| match host.name.as_str() {
            "b" => addresses(host),
            name => bail!("'{name}' is not found"),
        })
    }

    #[test]
    fn the_rules_lead_each_port_of_the_other_hosts_to_its_own_door() {
        let rules = |settings: &Settings| Rules::new(settings, addresses).on();
        let text = rules(&settings("intercept = \"60000-60001\"\n"));
        let rule = "meta mark != 0x706c6174 meta skuid { 0, 64055 } ip daddr { 10.0.0.2 } \
                    tcp dport 60000-60001 tcp flags & (fin | syn | rst | ack) == syn counter dnat to 127.80.0.2 : tcp dport map \
                    { 60000 : 110, 60001 : 111 }";
        assert!(text.contains(rule), "{text}");
        assert!(!text.contains("reject"), "{text}");
        let refusing = rules(&refusing("intercept = \"60000-60001\"\n"));
        let rule =
            "when_stopped meta mark != 0x706c6174 meta skuid { 0, 64055 } ip daddr { 10.0.0.2 } \
                    tcp dport 60000-60001 tcp flags & (fin | syn | rst | ack) == syn ct state new counter reject with tcp reset";
        assert!(refusing.contains(rule), "{refusing}");
        // The ports of this host itself are its QEMUs'.
        assert!(!text.contains("127.80.0.1"), "{text}");
        assert_eq!(rules(&settings("")), off());
        assert!(missing(&settings("")).is_none());
    }

    /// After a boot there is no table, and with a certificate that has expired no service.
    #[test]
    fn a_host_that_refuses_does_so_before_a_service_has_ever_run() {
        let rules = Rules::new(&refusing("intercept = \"60000-60001\"\n"), addresses);
        let reject = "add rule ip platen when_stopped meta mark != 0x706c6174 meta skuid \
                      { 0, 64055 } ip daddr { 10.0.0.2 } tcp dport 60000-60001 tcp flags & (fin | syn | rst | ack) == syn ct state new";
        for text in [stopped(None, Some(&rules)), rules.instead_of_on(None)] {
            let text = text.unwrap();
            assert!(text.contains(reject) && text.ends_with(HOLD), "{text}");
            assert!(text.contains("stopped jump when_stopped"), "{text}");
            assert!(!text.contains("dnat"), "{text}");
        }
        // A service that ends leaves its own, and rules in force are not replaced.
        let left = stopped(Some("reject with tcp reset"), None).unwrap();
        assert!(left.contains("stopped jump when_stopped") && !left.contains("flush table"));
        for listed in ["dnat to 127.80.0.2", "reject with tcp reset", "table ip platen {\n}\n"] {
            assert_eq!(rules.instead_of_on(Some(listed)), None, "{listed}");
        }
        // `platen host intercept off`, or `forward`.
        for listed in ["table ip platen {\n}\n", "dnat to 127.80.0.2"] {
            assert_eq!(stopped(Some(listed), Some(&rules)), None, "{listed}");
        }
        let forward = Rules::new(&settings("intercept = \"60000-60001\"\n"), addresses);
        assert_eq!(stopped(None, Some(&forward)), None);
        assert_eq!(forward.instead_of_on(None), None);
        assert_eq!(stopped(None, None), None);
    }

    #[test]
    fn a_host_that_is_not_found_takes_no_rule_from_the_others() {
        let rules = without_c(settings);
        let text = rules.on();
        assert!(text.contains("dnat to 127.80.0.2") && !text.contains("127.80.0.3"), "{text}");
        assert!(!text.contains("reject"), "{text}");
        assert_eq!(rules.known, ["b"]);
        let why = rules.why_not_all().unwrap();
        assert!(why.contains("'c' is not found") && why.contains("in the clear"), "{why}");
        // A rule that is in force is not lost by a name service that is away for a moment.
        assert_eq!(rules.would_lose("dnat to 127.80.0.2:tcp dport map"), None);
        let kept = rules.would_lose("dnat to 127.80.0.3:tcp dport map").unwrap();
        assert!(kept.contains("The rules stay as they are"), "{kept}");
    }

    #[test]
    fn a_host_that_is_not_found_is_refused_wherever_it_may_be() {
        let rules = without_c(refusing);
        let anywhere = "meta skuid { 0, 64055 } oifname != \"lo\" ip daddr != { 10.0.0.2 } \
                        tcp dport 60100-60101 tcp flags & (fin | syn | rst | ack) == syn ct state new counter reject with tcp reset\n";
        let is_in = |text: &str, chain: &str| {
            text.contains(&format!("add rule ip platen {chain} meta mark != 0x706c6174 {anywhere}"))
        };
        let on = rules.on();
        assert!(is_in(&on, "stopped") && is_in(&on, "when_stopped"), "{on}");
        assert!(on.contains("dnat to 127.80.0.2") && on.contains("add chain ip platen stopped"));
        assert!(is_in(&stopped(None, Some(&rules)).unwrap(), "when_stopped"));
        let why = rules.why_not_all().unwrap();
        assert!(why.contains("refused at every unknown address"), "{why}");
        assert_eq!(Rules::new(&refusing(""), addresses).why_not_all(), None);
    }

    #[test]
    fn a_host_without_an_ipv4_address_is_named() {
        let text = "name = \"b\"\naddress = \"::1\"\ndoor = \"127.80.0.2\"\nports = \"1-9\"\n";
        let config = host::Config::parse(&format!("[[host]]\n{text}")).unwrap();
        let error = addresses(&config.host[0]).unwrap_err().to_string();
        assert!(error.contains("'b'") && error.contains("no IPv4"), "{error}");
    }
}
