//! Keys, types and doc comments of the structs that serde reads and writes.

use syn::{
    Attribute, Expr, Fields, GenericArgument, Item, ItemStruct, Lit, Meta, PathArguments, Type,
};

/// One key. The key of a nested struct's field has dots; `[]` marks array elements.
pub(super) struct Field {
    pub(super) key: String,
    pub(super) kind: String,
    pub(super) meaning: String,
}

/// All keys of the struct with that name; nested structs must be in the same sources.
pub(super) fn fields(sources: &[&str], name: &str) -> Vec<Field> {
    let structs: Vec<ItemStruct> = sources
        .iter()
        .flat_map(|source| syn::parse_file(source).unwrap().items)
        .filter_map(|item| match item {
            Item::Struct(found) => Some(found),
            _ => None,
        })
        .collect();
    let mut fields = Vec::new();
    collect(&structs, name, "", &mut fields);
    assert!(!fields.is_empty(), "no struct {name}");
    fields
}

fn collect(structs: &[ItemStruct], name: &str, before: &str, into: &mut Vec<Field>) {
    let Some(found) = structs.iter().find(|item| item.ident == name) else { return };
    let kebab = serde(&found.attrs).iter().any(|said| said.contains("kebab-case"));
    let Fields::Named(named) = &found.fields else { panic!("{name} has no named fields") };
    for field in &named.named {
        let said = serde(&field.attrs);
        let has = |word: &str| said.iter().any(|said| said.contains(word));
        assert!(!has("rename") && !has("flatten"), "not understood: {said:?} in {name}");
        if said.iter().any(|said| said == "skip") {
            continue;
        }
        let ident = field.ident.as_ref().unwrap().to_string();
        let key = if kebab { ident.replace('_', "-") } else { ident };
        let (mut kind, nested, array) = kind(&field.ty);
        if has("skip_serializing_if") {
            kind = kind.replace(" or null", "") + ", may be absent";
        }
        let key = format!("{before}{key}");
        into.push(Field { key: key.clone(), kind, meaning: meaning(&field.attrs) });
        if let Some(nested) = nested {
            let dots = if array { "[]." } else { "." };
            collect(structs, &nested, &format!("{key}{dots}"), into);
        }
    }
}

/// The JSON type, the nested struct, and whether it is an array.
fn kind(of: &Type) -> (String, Option<String>, bool) {
    let path = match of {
        Type::Path(path) => path.path.segments.last().unwrap(),
        Type::Reference(reference) => return kind(&reference.elem),
        Type::Array(array) => return (format!("array of {}s", kind(&array.elem).0), None, true),
        _ => panic!("not understood: a field that is neither a path nor a reference"),
    };
    let inner: Vec<&Type> = match &path.arguments {
        PathArguments::AngleBracketed(inner) => inner
            .args
            .iter()
            .filter_map(|arg| match arg {
                GenericArgument::Type(inner) => Some(inner),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    let plain = |kind: &str| (kind.to_owned(), None, false);
    match path.ident.to_string().as_str() {
        "bool" => plain("boolean"),
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => plain("integer"),
        "f64" => plain("number"),
        "String" | "str" | "PathBuf" | "State" | "Weight" | "PortRange" | "Policy" | "Ipv4Addr"
        | "IpAddr" | "Role" | "Phase" | "Status" | "Verdict" | "Place" | "Feature" | "Origin" => {
            plain("string")
        }
        "BTreeMap" => (format!("object of {}s", kind(inner[1]).0), None, false),
        "Option" => {
            let (kind, nested, array) = kind(inner[0]);
            (format!("{kind} or null"), nested, array)
        }
        "Vec" => {
            let (kind, nested, _) = kind(inner[0]);
            (format!("array of {kind}s"), nested, true)
        }
        nested => ("object".to_owned(), Some(nested.to_owned()), false),
    }
}

/// Joins the doc comment to one line.
fn meaning(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(doc) if doc.path.is_ident("doc") => match &doc.value {
            Expr::Lit(text) => match &text.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    lines.collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The tokens of all `#[serde(...)]` attributes.
fn serde(attributes: &[Attribute]) -> Vec<String> {
    let lists = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("serde") => Some(list.tokens.to_string()),
        _ => None,
    });
    lists
        .flat_map(|list| list.split(',').map(|said| said.trim().to_owned()).collect::<Vec<_>>())
        .collect()
}
