//! This host: users, certificate, the service, its doors and ports.

use super::super::intercept;
use super::super::settings::Settings;
use super::super::status::{self, HostStatus, STATUS};
use super::super::ServiceArgs;
use super::Finding;
use host::{connection_owner, now, unix_listeners, DoorAddress};
use nix::unistd::User;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The user of the service, as the package makes it.
const SERVICE_USER: &str = "platen";
const DAY: u64 = 86_400;
/// Days before the end of a certificate from which on there is a warning.
const SOON: u64 = 30;

pub(super) fn check(args: &ServiceArgs, settings: &Settings) -> Vec<Finding> {
    let status = status::ask(args, STATUS).map(|(_, status)| status);
    let service = User::from_name(SERVICE_USER).ok().flatten();
    let key = settings.config.tls_dir.join(tls::KEY_FILE);
    let users = users(&settings.config.allow_users);
    let mut findings = vec![users, sockets(), certificate(settings)];
    findings.extend(service.and_then(|user| key_of(&key, user.uid.as_raw(), user.gid.as_raw())));
    findings.extend(run_dir(&settings.config.run_dir));
    findings.extend((settings.config.sockets > 0).then(|| unix_sockets(&settings.socket_folder())));
    findings.extend(intercept::missing(settings).map(led));
    findings.push(served(status.as_ref()));
    match status {
        Ok(status) => findings.push(open_doors(settings, &status)),
        Err(_) => findings.extend(free_ports(settings)),
    }
    findings
}

/// Checks the users who may connect to a door.
fn users(allowed: &[String]) -> Finding {
    const CHECK: &str = "users";
    let is_known = |name: &&String| {
        name.parse::<u32>().is_ok() || User::from_name(name).is_ok_and(|user| user.is_some())
    };
    let known: Vec<_> = allowed.iter().filter(is_known).cloned().collect();
    if known.is_empty() {
        let found = format!("this host has no user of allow_users = {allowed:?}");
        let advice = "name QEMU's user in allow_users (`user` in qemu.conf), unless QEMU is root";
        return Finding::warn(CHECK, found, advice);
    }
    Finding::ok(CHECK, format!("a door takes root, the service and {}", known.join(", ")))
}

/// Checks whether the kernel reports the user of a connection, which each door needs.
fn sockets() -> Finding {
    const CHECK: &str = "sockets";
    let owner = || -> std::io::Result<_> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        connection_owner(client.local_addr()?, client.peer_addr()?)
    };
    let advice = "modprobe tcp_diag: without it every connection to a door is reset";
    match owner() {
        Ok(Some(_)) => Finding::ok(CHECK, "the kernel tells who makes a connection"),
        Ok(None) => Finding::fail(CHECK, "the kernel does not tell who makes a connection", advice),
        Err(error) => {
            let found = format!("the kernel does not tell who makes a connection: {error}");
            Finding::fail(CHECK, found, advice)
        }
    }
}

fn certificate(settings: &Settings) -> Finding {
    const CHECK: &str = "certificate";
    let advice = "platen cert issue, on the host of the CA; then put the files there";
    let credentials = match settings.credentials() {
        Ok(credentials) => credentials,
        Err(error) => return Finding::fail(CHECK, format!("{error:#}"), advice),
    };
    let names = credentials.names();
    let me = &settings.me().name;
    if !names.iter().any(|name| name.eq_ignore_ascii_case(me)) {
        let found = format!(
            "{} is for {}, and the other hosts ask for '{me}'",
            settings.config.tls_dir.join(tls::CERT_FILE).display(),
            names.join(", ")
        );
        return Finding::fail(CHECK, found, advice);
    }
    match credentials.valid_until() {
        Err(error) => Finding::fail(CHECK, format!("{:#}", anyhow::Error::from(error)), advice),
        Ok(end) => {
            let finding = ends(end, now() / 1000);
            let number = credentials.fingerprint().map_or_else(String::new, |it| it.to_string());
            Finding { found: format!("{}; fingerprint {number}", finding.found), ..finding }
        }
    }
}

/// Judges the end of a certificate; both are seconds since 1970.
fn ends(end: u64, now: u64) -> Finding {
    const CHECK: &str = "certificate";
    let advice = "platen cert issue --force, on the host of the CA; then put the files there and \
                  `systemctl reload platen`";
    let days = end.saturating_sub(now) / DAY;
    if end <= now {
        return Finding::fail(
            CHECK,
            format!("it has expired {} days ago", (now - end) / DAY),
            advice,
        );
    }
    let found = format!("this host's certificate is good for {days} days");
    if days < SOON {
        Finding::warn(CHECK, found, advice)
    } else {
        Finding::ok(CHECK, found)
    }
}

/// Checks whether the service's user can read the key.
fn key_of(path: &Path, uid: u32, gid: u32) -> Option<Finding> {
    const CHECK: &str = "key";
    let found = fs::metadata(path).ok()?;
    let mode = found.mode();
    let may =
        (found.uid() == uid && mode & 0o400 != 0) || (found.gid() == gid && mode & 0o040 != 0);
    let path = path.display();
    Some(if may {
        Finding::ok(CHECK, format!("user {SERVICE_USER} can read {path}"))
    } else {
        Finding::fail(
            CHECK,
            format!("user {SERVICE_USER} cannot read {path} (mode {:o})", mode & 0o777),
            &format!("chgrp {SERVICE_USER} {path} && chmod 640 {path}"),
        )
    })
}

fn run_dir(path: &Path) -> Option<Finding> {
    // The service creates the folder.
    let mode = fs::metadata(path).ok()?.mode() & 0o7777;
    let shown = path.display();
    (mode & 0o022 != 0).then(|| {
        let found = format!("other users may write to {shown} (mode {mode:o})");
        Finding::fail("run_dir", found, &format!("chmod 700 {shown}"))
    })
}

/// Checks the folder in which QEMUs of this host listen at unix sockets.
fn unix_sockets(folder: &Path) -> Finding {
    const CHECK: &str = "unix sockets";
    let shown = folder.display();
    if let Err(error) = unix_listeners(&folder.join("1")) {
        let found = format!("the kernel does not tell who listens at a unix socket: {error}");
        let advice = "modprobe unix_diag: without it no VM may come to a unix socket";
        return Finding::fail(CHECK, found, advice);
    }
    let Ok(found) = fs::metadata(folder) else {
        let found = format!("there is no {shown}, in which QEMU would listen");
        return Finding::warn(CHECK, found, "systemctl restart platen: the service makes it");
    };
    // The service manager may have set a mode of its own since the service opened the folder.
    let shut = folder.ancestors().skip(1).find_map(|above| {
        let mode = fs::metadata(above).ok()?.mode() & 0o777;
        (mode & 0o001 == 0).then_some((above.display(), mode))
    });
    if let Some((above, mode)) = shut {
        let found = format!("QEMU cannot pass through {above} to {shown} (mode {mode:o})");
        let advice = format!("chmod o+x {above}; RuntimeDirectoryMode=0711 in a unit of your own");
        return Finding::fail(CHECK, found, &advice);
    }
    // The group's place in the mode is the mask of the access control list.
    if found.mode() & 0o070 != 0o070 {
        let found =
            format!("QEMU cannot make sockets in {shown} (mode {:o})", found.mode() & 0o777);
        return Finding::fail(
            CHECK,
            found,
            "systemctl restart platen: the service sets its rights",
        );
    }
    Finding::ok(CHECK, format!("QEMU can make sockets in {shown}"))
}

/// Checks whether the interception leads QEMU's connections to the doors, where it is configured.
fn led(missing: anyhow::Result<Vec<String>>) -> Finding {
    const CHECK: &str = "interception";
    let advice =
        "platen host intercept on; after each `nft flush ruleset` (a restart of nftables), too";
    match missing {
        Ok(missing) if missing.is_empty() => {
            Finding::ok(CHECK, "migrations to the ports of `intercept` are led to the doors")
        }
        Ok(missing) => {
            let found = format!(
                "migrations go past platen, in the clear, to {}: its rules are missing, or are not \
                 those of the configuration",
                missing.join(", ")
            );
            Finding::fail(CHECK, found, advice)
        }
        Err(error) => Finding::warn(CHECK, format!("{error:#}"), "run platen doctor as root"),
    }
}

fn served(status: Result<&HostStatus, &anyhow::Error>) -> Finding {
    const CHECK: &str = "service";
    match status {
        Ok(status) => {
            Finding::ok(CHECK, format!("it runs: {} migrations now", status.running.len()))
        }
        Err(error) => Finding::warn(CHECK, format!("{error:#}"), "systemctl enable --now platen"),
    }
}

/// Checks the doors of a service that runs.
fn open_doors(settings: &Settings, status: &HostStatus) -> Finding {
    const CHECK: &str = "doors";
    let all = settings.doors().count();
    let open = status.doors;
    if open == all as u64 {
        return Finding::ok(CHECK, format!("{open} are open"));
    }
    Finding::fail(
        CHECK,
        format!("{open} of {all} are open"),
        "the journal of the service names those that are shut and why; `ss -ltnp` names who has the \
         ports; after a change of the configuration: systemctl reload platen",
    )
}

/// Checks the ports that a service will need.
fn free_ports(settings: &Settings) -> Vec<Finding> {
    let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    let port = (settings.me().listen.unwrap_or(any), settings.config.port).into();
    let doors = settings.doors().filter_map(|(_, address)| match address {
        DoorAddress::Tcp(address) => Some(address),
        DoorAddress::Unix(_) => None,
    });
    vec![free("port", &[port]), free("doors", &doors.collect::<Vec<_>>())]
}

fn free(check: &str, addresses: &[SocketAddr]) -> Finding {
    let taken =
        addresses.iter().find_map(|address| Some((address, TcpListener::bind(address).err()?)));
    match taken {
        None => Finding::ok(check, format!("{} are free", addresses.len())),
        Some((address, error)) => Finding::fail(
            check,
            format!("cannot listen on {address}: {error}"),
            "`ss -ltnp` names who has it: end that, or give other ports in platen.toml",
        ),
    }
}

#[cfg(test)]
mod tests;
