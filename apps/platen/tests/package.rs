//! The Debian and the RPM package: what is in them. `make packages` installs them.

#[path = "package/removal.rs"]
mod removal;

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Runs a command, and returns what it has printed.
fn output(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {errors}");
    String::from_utf8(out.stdout).unwrap()
}

/// A package of the programs of this profile, unpacked.
struct Package {
    folder: tempfile::TempDir,
    file: PathBuf,
}

impl Package {
    fn make() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = Path::new(env!("CARGO_BIN_EXE_platen")).parent().unwrap();
        let manuals = programs.join("examples/manuals");
        assert!(manuals.exists(), "first: cargo build -p platen --examples");
        output(Command::new(manuals).arg(folder.path().join("manuals")));
        let made = output(
            Command::new(root().join("scripts/deb"))
                .args([programs, &folder.path().join("manuals")])
                .env("PLATEN_DEB_OUT", folder.path().join("out"))
                .env("PLATEN_DEB_COMPRESSION", "none"),
        );
        let package = Self { file: made.trim_end().into(), folder };
        output(Command::new("dpkg-deb").arg("-R").args([&package.file, &package.at("")]));
        package
    }

    /// The place of a file of the package.
    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join("unpacked").join(path)
    }

    fn text(&self, path: &str) -> String {
        std::fs::read_to_string(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }
}

#[test]
fn the_package_has_programs_manuals_completions_units_and_scripts_that_fit() {
    let package = Package::make();
    let field = |name: &str| {
        output(Command::new("dpkg-deb").arg("-f").arg(&package.file).arg(name)).trim().to_owned()
    };
    assert_eq!(field("Package"), "platen");
    assert_eq!(field("Version"), concat!(env!("CARGO_PKG_VERSION"), "-1"));
    assert!(field("Depends").contains("libc6 (>= "), "{}", field("Depends"));
    assert!(field("Installed-Size").parse::<u32>().unwrap() > 1000);
    let control = package.text("DEBIAN/control");
    assert!(!control.contains('@') || control.matches('@').count() == 1, "{control}");

    // Modes and owners, as dpkg unpacks them.
    let listed = output(Command::new("dpkg-deb").arg("-c").arg(&package.file));
    let modes = |path: &str| {
        let line = listed.lines().find(|line| line.ends_with(&format!(" .{path}")));
        line.unwrap_or_else(|| panic!("no {path}: {listed}"))[..10].to_owned()
    };
    for program in ["/usr/bin/platen", "/usr/bin/platen-device"] {
        assert_eq!(modes(program), "-rwxr-xr-x");
    }
    assert_eq!(modes("/lib/systemd/system/platen.service"), "-rw-r--r--");
    // libvirt's compressors are links to the program, which the example of a drop-in lets it find.
    let dropin = package.text("usr/share/doc/platen/examples/libvirt-filters.conf");
    assert!(dropin.contains("\nEnvironment=PATH=/usr/lib/platen/filters:/usr/sbin:"), "{dropin}");
    for name in ["gzip", "zstd"] {
        let filter = package.at(&format!("usr/lib/platen/filters/{name}"));
        let program = package.at("usr/bin/platen").canonicalize().unwrap();
        assert_eq!(filter.canonicalize().unwrap(), program, "{name}");
    }
    assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
    for script in ["postinst", "prerm", "postrm"] {
        output(Command::new("sh").arg("-n").arg(package.at(&format!("DEBIAN/{script}"))));
    }
    assert_eq!(package.text("DEBIAN/conffiles"), "/etc/platen/platen.toml\n");
    output(
        Command::new("md5sum")
            .args(["--quiet", "-c", "DEBIAN/md5sums"])
            .current_dir(package.at("")),
    );

    // The unit starts programs of the package.
    let unit = package.text("lib/systemd/system/platen.service");
    let programs: BTreeSet<&str> = unit
        .lines()
        .filter_map(|line| line.strip_prefix("Exec")?.split_once('=')?.1.split(' ').next())
        .filter(|program| program.starts_with("/usr/bin/"))
        .collect();
    assert_eq!(programs, BTreeSet::from(["/usr/bin/platen"]));
    // A migration goes on when a call is refused, and when another one is killed.
    for line in ["SystemCallErrorNumber=EPERM", "OOMPolicy=continue", "KillMode=process"] {
        assert!(unit.lines().any(|there| there == line), "{line}: {unit}");
    }
    // No number of failed starts ends the service for good. It waits for the clock of a host that
    // sets one, and starts no service for that (systemd.special(7), "passive").
    for line in ["StartLimitIntervalSec=0", "After=network-online.target time-sync.target"] {
        assert!(unit.lines().any(|there| there == line), "{line}: {unit}");
    }
    assert!(!unit.contains("Wants=time-") && !unit.contains("Requires="), "{unit}");
    // Rules for QEMU's connections are there while the service is, and end nothing if they fail.
    for line in [
        "ExecStartPost=-+/usr/bin/platen host intercept on",
        "ExecStopPost=-+/usr/bin/platen host intercept stopped",
        "ExecReload=-+/usr/bin/platen host intercept on",
    ] {
        assert!(unit.lines().any(|there| there == line), "{line}: {unit}");
    }
    // A seed can be written, and with the lowest priority.
    for line in ["StateDirectory=platen", "SystemCallFilter=sched_setaffinity setpriority"] {
        assert!(unit.lines().any(|there| there == line), "{line}: {unit}");
    }
    // By netlink it is asked who is at a door.
    assert!(unit.contains("AF_NETLINK"), "{unit}");
    for documented in unit.lines().filter_map(|line| line.split_once("file:///")) {
        assert!(package.at(documented.1).exists(), "{}", documented.1);
    }
    // The configuration is one that parses, but for its hosts.
    let sample = package.at("etc/platen/platen.toml");
    let program = package.at("usr/bin/platen");
    let check = |sample: &Path| {
        let out = Command::new(&program).args(["config", "check"]).arg(sample).output().unwrap();
        String::from_utf8([out.stdout, out.stderr].concat()).unwrap()
    };
    let checked = check(&sample);
    assert!(checked.contains("[[host]]: there are 0"), "{checked}");
    // Without the marks in front of its keys it is in order, and says the defaults.
    let text = package.text("etc/platen/platen.toml");
    let keys = text.lines().filter_map(|line| line.strip_prefix('#'));
    let keys: Vec<&str> = keys.filter(|key| !key.is_empty() && !key.starts_with(' ')).collect();
    std::fs::write(&sample, keys.join("\n")).unwrap();
    let checked = check(&sample);
    assert!(checked.contains("hosta") && checked.contains("is in order"), "{checked}");
    let of_hosts = keys.iter().position(|key| *key == "[[host]]").unwrap();
    assert!(of_hosts >= 10, "{keys:?}");
    let reference = std::fs::read_to_string(root().join("docs/reference.md")).unwrap();
    let section = reference.split_once("## Configuration of `platen host`").unwrap().1;
    for key in &keys[..of_hosts] {
        let (key, value) = key.split_once(" = ").unwrap();
        let row = section.split_once(&format!("| `{key}` | ")).unwrap_or_else(|| panic!("{key}")).1;
        let default = row.split(" | ").nth(1).unwrap().trim_matches('`');
        assert!(default == "none" || default == value.replace(", ", ","), "{key}: {default}");
    }
}

#[test]
fn each_command_has_a_manual_page_with_its_options_and_a_completion() {
    let package = Package::make();
    let reference = std::fs::read_to_string(root().join("docs/reference.md")).unwrap();
    let commands: Vec<&str> = reference
        .lines()
        .filter_map(|line| line.strip_prefix("## `platen")?.strip_suffix('`'))
        .collect();
    assert!(commands.len() > 20, "{commands:?}");
    let bash = package.text("usr/share/bash-completion/completions/platen");
    output(
        Command::new("bash")
            .arg("-n")
            .arg(package.at("usr/share/bash-completion/completions/platen")),
    );
    for command in commands {
        let page = format!("usr/share/man/man1/platen{}.1.gz", command.replace(' ', "-"));
        let page = output(Command::new("gzip").arg("-dc").arg(package.at(&page)));
        let section = reference.split_once(&format!("## `platen{command}`\n")).unwrap().1;
        let section = section.split("\n## ").next().unwrap();
        let options = section.lines().filter_map(|line| {
            let name = line.strip_prefix("| `--")?;
            Some(name.split(['`', ' ', '=', '[']).next().unwrap())
        });
        for option in options {
            let written = format!("\\-\\-{}", option.replace('-', "\\-"));
            assert!(page.contains(&written), "platen{command}: no --{option} in its page");
            assert!(bash.contains(&format!("--{option}")), "platen{command}: --{option}");
        }
    }
    for hidden in ["platen-keep", "platen-carry", "platen-play"] {
        assert!(!package.at(&format!("usr/share/man/man1/{hidden}.1.gz")).exists(), "{hidden}");
    }
    for path in ["zsh/vendor-completions/_platen", "fish/vendor_completions.d/platen.fish"] {
        assert!(package.text(&format!("usr/share/{path}")).contains("doctor"), "{path}");
    }
}

/// systemd sets the mode of these folders for each command that it starts, `ExecStartPost` too. The
/// mode that the service has set is then gone, and QEMU's users have to pass to the sockets.
#[test]
fn the_unit_s_folders_let_qemu_pass_to_its_sockets() {
    let unit = root().join("packaging/systemd/platen.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let values = |key: &str| {
        let of_key = |line: &'_ str| Some(line.strip_prefix(key)?.strip_prefix('=')?.to_owned());
        unit.lines().filter_map(of_key).collect::<Vec<_>>()
    };
    assert_eq!(values("RuntimeDirectory"), ["platen/host platen/doors"]);
    assert_eq!(values("RuntimeDirectoryMode"), ["0711"]);
    // Files of the service for which it sets no mode are its own.
    assert_eq!(values("UMask"), ["0077"]);
}

/// Makes a command of this text. Another process writes it: one that another test is starting would
/// have a copy of a file that is open for writing here, and the kernel does not execute such a
/// file.
fn make_command(path: &Path, text: &str) {
    let make = ["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""];
    output(Command::new("/bin/sh").args(make).arg(path).arg(text));
}

/// Runs a script of a package with made commands only, which log their calls. `getent` knows what
/// `known` lists, such as "group platen".
fn calls_of(script: &str, arguments: &[&str], known: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (commands, log) = (folder.path().join("bin"), folder.path().join("log"));
    std::fs::create_dir(&commands).unwrap();
    let logs = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >>'{}'\n", log.display());
    let known = known.join("|").replace(' ', "\\ ");
    let knows = format!("#!/bin/sh\ncase \"$*\" in {known}) ;; *) exit 2 ;; esac\n");
    let logged =
        ["useradd", "mkdir", "chown", "chmod", "install", "deb-systemd-helper", "systemctl"];
    for (name, text) in logged.map(|name| (name, &logs)).into_iter().chain([("getent", &knows)]) {
        make_command(&commands.join(name), text);
    }
    let path = folder.path().join("script");
    std::fs::write(&path, script).unwrap();
    output(Command::new("/bin/sh").arg(&path).args(arguments).env("PATH", &commands));
    std::fs::read_to_string(&log).unwrap_or_default()
}

/// `useradd --user-group` fails if there is a group of the name.
#[test]
fn the_user_of_the_package_is_made_once_and_joins_a_group_of_its_name() {
    let text = |path: &str| std::fs::read_to_string(root().join("packaging").join(path)).unwrap();
    let spec = text("rpm/platen.spec");
    let pre = spec.split_once("\n%pre\n").unwrap().1.split_once("\n%post\n").unwrap().0;
    for (script, arguments) in
        [(text("debian/postinst"), &["configure"][..]), (pre.to_owned(), &["1"])]
    {
        let calls = calls_of(&script, arguments, &["none"]);
        assert!(calls.contains("useradd --system --user-group --home-dir"), "{calls}");
        let calls = calls_of(&script, arguments, &["group platen"]);
        assert!(calls.contains("useradd --system --gid platen --home-dir"), "{calls}");
        let calls = calls_of(&script, arguments, &["group platen", "passwd platen"]);
        assert!(!calls.contains("useradd"), "{calls}");
    }
}

/// rpm sets mode and owner of each folder in a package at each upgrade.
#[test]
fn an_rpm_makes_the_folder_of_keys_once_and_leaves_it_alone_after_that() {
    let spec = std::fs::read_to_string(root().join("packaging/rpm/platen.spec")).unwrap();
    for folder in ["/etc/platen", "/etc/platen/tls"] {
        let listed = spec.lines().find(|line| line.ends_with(&format!(" {folder}"))).unwrap();
        assert!(listed.starts_with("%ghost %dir "), "{listed}");
    }
    let post = spec.split_once("\n%post\n").unwrap().1.split_once("\n%preun\n").unwrap().0;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("tls");
    let post = post.replace("/etc/platen/tls", keys.to_str().unwrap());
    let calls = calls_of(&post, &["1"], &["none"]);
    assert!(calls.contains(&format!("install -d -m 0750 -g platen {}", keys.display())), "{calls}");
    std::fs::create_dir(&keys).unwrap();
    let calls = calls_of(&post, &["2"], &["none"]);
    assert!(!calls.contains("install"), "{calls}");
}

/// systemd-tmpfiles runs at each boot.
#[test]
fn a_boot_keeps_the_mode_that_an_administrator_gave_the_folder_of_keys() {
    if Command::new("systemd-tmpfiles").arg("--version").output().is_err()
        || !rustix::process::geteuid().is_root()
    {
        println!("skipped: there is no systemd-tmpfiles, or this is not root");
        return;
    }
    let new_root = tempfile::tempdir().unwrap();
    let at = |path: &str| new_root.path().join(path);
    std::fs::create_dir_all(at("etc")).unwrap();
    std::fs::write(at("etc/passwd"), "root:x:0:0::/:\nplaten:x:4711:4712::/:\n").unwrap();
    std::fs::write(at("etc/group"), "root:x:0:\nplaten:x:4712:\n").unwrap();
    let boot = || {
        output(
            Command::new("systemd-tmpfiles")
                .arg("--create")
                .arg(format!("--root={}", new_root.path().display()))
                .arg(root().join("packaging/tmpfiles.d/platen.conf")),
        )
    };
    let keys = at("etc/platen/tls");
    let access = || {
        let found = std::fs::metadata(&keys).unwrap();
        (found.mode() & 0o7777, found.uid(), found.gid())
    };
    boot();
    assert_eq!(access(), (0o750, 0, 4712));
    std::fs::set_permissions(&keys, Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&keys, Some(4711), Some(0)).unwrap();
    boot();
    assert_eq!(access(), (0o700, 4711, 0));
}

/// The paths of a package's files, without what differs between distributions by custom.
fn common(files: impl Iterator<Item = String>) -> BTreeSet<String> {
    let custom = ["/usr/share/doc/", "/usr/share/licenses/", "/usr/share/lintian/"];
    let files = files.filter(|path| !custom.iter().any(|start| path.starts_with(start)));
    let files = files.map(|path| {
        let path =
            path.replace("/usr/share/zsh/site-functions/", "/usr/share/zsh/vendor-completions/");
        path.replace("/usr/lib/systemd/", "/lib/systemd/")
    });
    files.collect()
}

#[test]
fn the_rpm_package_has_the_files_of_the_debian_package_and_scripts_that_are_read() {
    let with_rpm = || Command::new(root().join("scripts/with-rpm"));
    let found = with_rpm().arg("--version").output().unwrap();
    if !found.status.success() {
        return println!("skipped: {}", String::from_utf8_lossy(&found.stderr).trim());
    }
    let debian = Package::make();
    let programs = Path::new(env!("CARGO_BIN_EXE_platen")).parent().unwrap();
    let made = output(
        Command::new(root().join("scripts/rpm"))
            .args([programs, &debian.folder.path().join("manuals")])
            .env("PLATEN_RPM_OUT", debian.folder.path().join("rpm")),
    );
    let query =
        |what: &[&str]| output(with_rpm().args(["rpm", "-qp"]).args(what).arg(made.trim_end()));
    let of = |query: String| query.lines().map(String::from).collect::<Vec<_>>();
    // With a slash at its end a path is a folder's.
    let debian = output(Command::new("dpkg-deb").arg("-c").arg(&debian.file));
    let debian = debian.lines().filter_map(|line| Some(line.split_once(" ./")?.1));
    let debian = debian.filter(|path| !path.ends_with('/') && !path.is_empty());
    let rpm = of(query(&["--qf", "[%{FILEMODES:perms} %{FILENAMES} -> %{FILELINKTOS}\n]"]));
    let rpm = rpm.iter().filter_map(|line| {
        let (mode, path) = line.split_once(' ')?;
        match mode.as_bytes().first()? {
            b'-' => Some(path.strip_suffix(" -> ")?.to_owned()),
            b'l' => Some(path.to_owned()),
            _ => None,
        }
    });
    let rpm = common(rpm);
    assert_eq!(rpm, common(debian.map(|path| format!("/{path}"))));
    assert!(rpm.contains("/usr/bin/platen") && rpm.len() > 30, "{rpm:?}");
    assert_eq!(query(&["-c"]), "/etc/platen/platen.toml\n");
    assert_eq!(query(&["--qf", "%{VERSION}"]), env!("CARGO_PKG_VERSION"));
    assert!(query(&["--requires"]).contains("libc.so.6"));
    // Each script is one that sh reads.
    let scripts = query(&["--qf", "%{PREIN}\n%{POSTIN}\n%{PREUN}\n%{POSTUN}\n"]);
    assert!(scripts.contains("useradd") && scripts.contains("try-restart platen"), "{scripts}");
    output(Command::new("sh").args(["-n", "-c", &scripts]));
}
