// Renders a chart as Helm does, with the values of a JSON document on standard input on top of values.yaml. The first
// argument is the chart, and the others name the objects that are in the cluster. `helm template` sees none.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type values = map[string]any

func main() {
	log.SetFlags(0)
	chart := os.Args[1]
	settings, metadata, overrides := values{}, values{}, values{}
	read(filepath.Join(chart, "values.yaml"), settings)
	read(filepath.Join(chart, "Chart.yaml"), metadata)
	check(json.NewDecoder(os.Stdin).Decode(&overrides))
	merge(settings, overrides)

	all := template.New(chart).Option("missingkey=zero").Funcs(sprig.TxtFuncMap())
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"lookup": func(_, _, _, name string) values {
			if slices.Contains(os.Args[2:], name) {
				return values{"metadata": values{"name": name}}
			}
			return values{}
		},
		"required": func(message string, value any) (any, error) {
			if value == nil || value == "" {
				return nil, errors.New(message)
			}
			return value, nil
		},
		"toYaml": func(value any) (string, error) {
			// As in Helm, by way of JSON, so that a large whole number has no exponent.
			document, err := json.Marshal(value)
			if err != nil {
				return "", err
			}
			var plain any
			if err := yaml.Unmarshal(document, &plain); err != nil {
				return "", err
			}
			text, err := yaml.Marshal(plain)
			return strings.TrimSuffix(string(text), "\n"), err
		},
	})
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	template.Must(all.ParseFiles(names...))
	data := values{
		"Values":  settings,
		"Chart":   values{"Name": metadata["name"], "AppVersion": metadata["appVersion"]},
		"Release": values{"Name": "loramux", "Namespace": "default", "Service": "Helm"},
	}
	for _, name := range names {
		if strings.HasSuffix(name, ".yaml") {
			fmt.Println("---")
			check(all.ExecuteTemplate(os.Stdout, filepath.Base(name), data))
		}
	}
}

func read(path string, into values) {
	text, err := os.ReadFile(path)
	check(err)
	check(yaml.Unmarshal(text, into))
}

func merge(into, from values) {
	for name, value := range from {
		inner, isMap := value.(values)
		old, wasMap := into[name].(values)
		if isMap && wasMap {
			merge(old, inner)
		} else {
			into[name] = value
		}
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
