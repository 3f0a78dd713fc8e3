package main

import (
	"bytes"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// The declarations of a descriptor, each with its name in a path. These lists
// are compared by name; all other lists are compared as sets of values.
var declarations = map[protoreflect.FullName]string{
	"google.protobuf.FileDescriptorProto.message_type": "message",
	"google.protobuf.FileDescriptorProto.enum_type":    "enum",
	"google.protobuf.FileDescriptorProto.service":      "service",
	"google.protobuf.FileDescriptorProto.extension":    "extension",
	"google.protobuf.DescriptorProto.field":            "field",
	"google.protobuf.DescriptorProto.extension":        "extension",
	"google.protobuf.DescriptorProto.nested_type":      "message",
	"google.protobuf.DescriptorProto.enum_type":        "enum",
	"google.protobuf.DescriptorProto.oneof_decl":       "oneof",
	"google.protobuf.EnumDescriptorProto.value":        "value",
	"google.protobuf.ServiceDescriptorProto.method":    "method",
}

// A field's oneof, stored as an index into the message's list of oneofs.
const oneofIndex = "google.protobuf.FieldDescriptorProto.oneof_index"

// A pair holds the same thing from both descriptors, ours first.
type pair[T any] struct{ ours, standard T }

// A comparer walks two descriptors and collects their differences.
type comparer struct {
	differences []string
	// The oneof names of the message being walked.
	oneofs pair[[]string]
}

// compare returns one line for each difference between two file descriptors,
// and none if they declare the same things in the same way. It walks every
// field there is in a descriptor, rather than a list of the known ones, so that
// nothing is passed over. Exempt are the file's name, its comments and
// positions, and the order of declarations.
func compare(ours, standard *descriptorpb.FileDescriptorProto) []string {
	var c comparer
	c.message("", normal(ours), normal(standard))
	return c.differences
}

// normal returns a copy of a file without what is exempt from comparison.
func normal(file *descriptorpb.FileDescriptorProto) protoreflect.Message {
	file = proto.Clone(file).(*descriptorpb.FileDescriptorProto)
	file.Name = nil
	file.SourceCodeInfo = nil
	return file.ProtoReflect()
}

// report adds a difference in one property of the declaration at path.
func (c *comparer) report(path, property, ours, standard string) {
	if path == "" {
		path = "file"
	}
	c.differences = append(c.differences,
		fmt.Sprintf("%s: %s: ours %s, standard %s", path, property, ours, standard))
}

// message compares two declarations, or the options of two declarations.
func (c *comparer) message(path string, ours, standard protoreflect.Message) {
	if ours.Descriptor().FullName() == "google.protobuf.DescriptorProto" {
		outer := c.oneofs
		c.oneofs = pair[[]string]{oneofNames(ours), oneofNames(standard)}
		defer func() { c.oneofs = outer }()
	}
	for _, field := range fields(ours, standard) {
		switch {
		case field.IsList():
			c.list(path, field, ours.Get(field).List(), standard.Get(field).List())
		case field.FullName() == oneofIndex:
			c.value(path, field,
				oneofName(ours, field, c.oneofs.ours),
				oneofName(standard, field, c.oneofs.standard))
		case field.Message() != nil && !field.IsExtension():
			// Options, or a part of them. Absent and empty mean the same.
			c.message(path, ours.Get(field).Message(), standard.Get(field).Message())
		default:
			c.value(path, field, shown(ours, field), shown(standard, field))
		}
	}
	// What the decoder does not know, such as an option of another number.
	if !bytes.Equal(ours.GetUnknown(), standard.GetUnknown()) {
		c.report(path, "unknown content",
			hex(ours.GetUnknown()), hex(standard.GetUnknown()))
	}
}

// value compares one property, given as text.
func (c *comparer) value(path string, field protoreflect.FieldDescriptor, ours, standard string) {
	if ours != standard {
		c.report(path, label(field), ours, standard)
	}
}

// list compares two lists: declarations by name, others as sets of values.
func (c *comparer) list(path string, field protoreflect.FieldDescriptor, ours, standard protoreflect.List) {
	kind, named := declarations[field.FullName()]
	if !named {
		c.set(path, field, ours, standard)
		return
	}
	byName := pair[map[string]protoreflect.Message]{index(ours), index(standard)}
	if len(byName.ours) != ours.Len() {
		c.report(path, kind+" names", "not unique", "unique")
	}
	for _, name := range keys(byName.ours, byName.standard) {
		inner := strings.TrimSpace(path + " " + kind + " " + name)
		if field.Name() == "nested_type" {
			inner = path + "." + name
		}
		a, inOurs := byName.ours[name]
		b, inStandard := byName.standard[name]
		if inOurs && inStandard {
			c.message(inner, a, b)
		} else {
			c.report(inner, "declaration", presence(inOurs), presence(inStandard))
		}
	}
}

// set compares two lists whose order does not matter, value by value.
func (c *comparer) set(path string, field protoreflect.FieldDescriptor, ours, standard protoreflect.List) {
	count := pair[map[string]int]{elements(field, ours), elements(field, standard)}
	for _, value := range keys(count.ours, count.standard) {
		if a, b := count.ours[value], count.standard[value]; a != b {
			c.report(path, label(field)+" "+value, times(a), times(b))
		}
	}
}

// fields returns the fields set in either message, in the order of their
// numbers. Extensions are among them.
func fields(a, b protoreflect.Message) []protoreflect.FieldDescriptor {
	seen := map[protoreflect.FieldNumber]protoreflect.FieldDescriptor{}
	for _, m := range []protoreflect.Message{a, b} {
		m.Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
			seen[field.Number()] = field
			return true
		})
	}
	sorted := make([]protoreflect.FieldDescriptor, 0, len(seen))
	for _, field := range seen {
		sorted = append(sorted, field)
	}
	sort.Slice(sorted, func(i, j int) bool {
		return sorted[i].Number() < sorted[j].Number()
	})
	return sorted
}

// label names a property in a difference.
func label(field protoreflect.FieldDescriptor) string {
	name := string(field.Name())
	// FieldOptions, MethodOptions and so on hold options, and nothing else does.
	if strings.HasSuffix(string(field.ContainingMessage().Name()), "Options") {
		return "option " + name
	}
	return name
}

// shown returns a field's value as text, or "unset".
func shown(m protoreflect.Message, field protoreflect.FieldDescriptor) string {
	if !m.Has(field) {
		return "unset"
	}
	return text(field, m.Get(field))
}

// text returns a single value as text. The same value gives the same text.
func text(field protoreflect.FieldDescriptor, value protoreflect.Value) string {
	switch field.Kind() {
	case protoreflect.StringKind:
		return strconv.Quote(value.String())
	case protoreflect.BytesKind:
		return hex(value.Bytes())
	case protoreflect.EnumKind:
		if known := field.Enum().Values().ByNumber(value.Enum()); known != nil {
			return string(known.Name())
		}
		return strconv.Itoa(int(value.Enum()))
	case protoreflect.MessageKind, protoreflect.GroupKind:
		m := value.Message()
		var parts []string
		for _, inner := range fields(m, m) {
			if !inner.IsList() {
				parts = append(parts, label(inner)+" "+text(inner, m.Get(inner)))
				continue
			}
			list := m.Get(inner).List()
			for i := 0; i < list.Len(); i++ {
				parts = append(parts, label(inner)+" "+text(inner, list.Get(i)))
			}
		}
		if len(m.GetUnknown()) > 0 {
			parts = append(parts, "unknown content "+hex(m.GetUnknown()))
		}
		return "{" + strings.Join(parts, ", ") + "}"
	default:
		return fmt.Sprint(value.Interface())
	}
}

// elements counts the values in a list.
func elements(field protoreflect.FieldDescriptor, list protoreflect.List) map[string]int {
	count := map[string]int{}
	for i := 0; i < list.Len(); i++ {
		count[text(field, list.Get(i))]++
	}
	return count
}

// index returns the declarations in a list by name.
func index(list protoreflect.List) map[string]protoreflect.Message {
	byName := map[string]protoreflect.Message{}
	for i := 0; i < list.Len(); i++ {
		m := list.Get(i).Message()
		byName[m.Get(m.Descriptor().Fields().ByName("name")).String()] = m
	}
	return byName
}

// oneofNames returns the names of the oneofs a message declares, by index.
func oneofNames(m protoreflect.Message) []string {
	list := m.Get(m.Descriptor().Fields().ByName("oneof_decl")).List()
	names := make([]string, list.Len())
	for i := range names {
		oneof := list.Get(i).Message()
		names[i] = oneof.Get(oneof.Descriptor().Fields().ByName("name")).String()
	}
	return names
}

// oneofName returns the name of the oneof a field belongs to, or "unset".
func oneofName(m protoreflect.Message, field protoreflect.FieldDescriptor, names []string) string {
	if !m.Has(field) {
		return "unset"
	}
	i := m.Get(field).Int()
	if i < 0 || i >= int64(len(names)) {
		return strconv.FormatInt(i, 10)
	}
	return names[i]
}

// keys returns the keys of both maps in order, each once.
func keys[V any](a, b map[string]V) []string {
	var sorted []string
	for key := range a {
		sorted = append(sorted, key)
	}
	for key := range b {
		if _, both := a[key]; !both {
			sorted = append(sorted, key)
		}
	}
	sort.Strings(sorted)
	return sorted
}

func presence(present bool) string {
	if present {
		return "present"
	}
	return "absent"
}

func times(n int) string {
	switch n {
	case 0, 1:
		return presence(n == 1)
	default:
		return fmt.Sprintf("present %d times", n)
	}
}

func hex(b []byte) string {
	if len(b) == 0 {
		return "none"
	}
	return fmt.Sprintf("%x", b)
}

// totals counts what a file declares.
type totals struct{ services, methods, messages, fields, enums int }

// count counts the declarations in a file, nested ones among them. The entry
// messages which protoc makes up for map fields are left out.
func count(file *descriptorpb.FileDescriptorProto) totals {
	t := totals{services: len(file.GetService()), enums: len(file.GetEnumType())}
	for _, service := range file.GetService() {
		t.methods += len(service.GetMethod())
	}
	t.addMessages(file.GetMessageType())
	return t
}

func (t *totals) addMessages(messages []*descriptorpb.DescriptorProto) {
	for _, m := range messages {
		if m.GetOptions().GetMapEntry() {
			continue
		}
		t.messages++
		t.fields += len(m.GetField())
		t.enums += len(m.GetEnumType())
		t.addMessages(m.GetNestedType())
	}
}

func (t totals) String() string {
	return fmt.Sprintf("%d services, %d methods, %d messages, %d fields, %d enums",
		t.services, t.methods, t.messages, t.fields, t.enums)
}
